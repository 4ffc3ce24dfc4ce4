"""What an adapter must answer about its model family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm.layout import VisualTokens, unknown_place


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

    @property
    def whole(self) -> int:
        """Which of a picture's crops shows the whole of it: 0 the first, -1 the last."""

    def tokens(
        self,
        model: Any,
        ids: np.ndarray,
        position: np.ndarray,
        inputs: Any,
        first_image: int,
        sizes: Sequence[tuple[int, int]] | None,
    ) -> tuple[VisualTokens, int]:
        """Place one sample's visual tokens.

        Args:
            model: the model.
            ids: `(sequence,)` the sample's token ids.
            position: `(n,)` positions of the sample's visual tokens in the sequence, at least one.
            inputs: what the processor returned for the batch (grids, image sizes …), with `input_ids` of all prompts.
            first_image: number of the sample's first image within the batch; a video counts as one image.
            sizes: (width, height) of every original picture and video, in the order of the prompts; None: boxes
                are in pixels of the model's view.

        Returns:
            the tokens, and how many images they come from.

        Raises:
            DartLabError: the visual tokens do not make up whole images (a truncated prompt).
        """

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        """Rows of the vision tower's input that each picture of the batch occupies, whose `samples` were placed before;
        None: unknown.
        """

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        """For each picture of the batch `(rows, 4)`: the part of it that each row of the tower's input shows, as shares
        left, top, right, bottom; None: every row shows a whole picture.
        """


def placed(
    family: Family,
    model: Any,
    ids: np.ndarray,
    position: np.ndarray,
    inputs: Any,
    first_image: int,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> tuple[VisualTokens, int]:
    """`Family.tokens`, which is asked only about a sample that has visual tokens."""
    if not len(position):
        return unknown_place(position), 0
    return family.tokens(model, ids, position, inputs, first_image, sizes)


def image_token(config: Any) -> int:
    """The id of the image placeholder, under its newer or older name."""
    return int(getattr(config, "image_token_id", None) or config.image_token_index)


def fill_pictures(
    position: np.ndarray, pictures: Iterable[VisualTokens], source: str
) -> tuple[VisualTokens, int]:
    """Lay pictures one after the other over a sample's visual tokens until all have a place.

    Args:
        position: `(n,)` positions of the sample's visual tokens, at least one.
        pictures: the tokens of each further picture of the batch, as `image` 0 at any position.
        source: the input that says how large the pictures are, for the error.

    Returns:
        the tokens, and how many pictures they are.

    Raises:
        DartLabError: the positions are not those of whole pictures.
    """
    parts: list[VisualTokens] = []
    used = 0
    for picture in pictures:
        if used >= len(position):
            break
        here = position[used : used + len(picture)].astype(np.int64)
        used += len(picture)
        if len(here) == len(picture):
            parts.append(replace(picture, position=here, image=picture.image + len(parts)))
    if used != len(position):
        raise DartLabError(
            f"{len(position)} visual tokens are not whole images of {source}: the prompt cuts an image "
            "(a truncated prompt or chunked prefill); leave the image whole"
        )
    return VisualTokens.join(parts), len(parts)
