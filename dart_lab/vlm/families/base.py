"""What an adapter must answer about its model family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from dart_lab.vlm.layout import VisualTokens


class Family(Protocol):
    """Answers two questions from the config and the token ids alone; parts of the model are found by their shape."""

    @property
    def name(self) -> str:
        """Name of the family, as in `dart-lab list models`."""

    @property
    def model_types(self) -> tuple[str, ...]:
        """`config.model_type` values."""

    @property
    def prompt(self) -> str:
        """Prompt for one image and `{question}` when the processor has no chat template."""

    def visual_mask(self, model: Any, input_ids: Tensor) -> Tensor:
        """`(batch, sequence)` bool: which token ids stand for visual tokens."""

    def tokens(
        self, model: Any, position: np.ndarray, inputs: Any, first_image: int, sizes: Sequence[tuple[int, int]] | None
    ) -> tuple[VisualTokens, int]:
        """Place one sample's visual tokens.

        Args:
            model: the model.
            position: `(n,)` positions of the sample's visual tokens in the sequence.
            inputs: what the processor returned for the batch (grids, image sizes …).
            first_image: number of the sample's first image within the batch.
            sizes: (width, height) of every original picture of the batch; None: boxes are in pixels of the model's
                view.

        Returns:
            the tokens, and how many images they come from.

        Raises:
            DartLabError: the visual tokens do not make up whole images (a truncated prompt).
        """

    def pixel_rows(self, images: int) -> int | None:
        """Rows of the vision tower's input that `images` images occupy; None if that cannot be told."""
