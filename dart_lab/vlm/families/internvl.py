"""InternVL: the picture stretched over a grid of tiles, each a square of folded patches, and a thumbnail behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm import compat
from dart_lab.vlm.families.base import image_token
from dart_lab.vlm.families.tiles import check_whole_tiles, one, rows_by_crops, runs, side_of, tiled
from dart_lab.vlm.layout import VisualTokens


@dataclass(frozen=True)
class InternVL:
    """Adapter for `InternVLForConditionalGeneration`; a video's frames count as pictures of one tile.

    A picture's tokens follow one another without a gap. One tile is the whole picture; of several the last one is a
    thumbnail of the whole, and the others are laid out as the image processor does it for the picture's shape. Without
    the original pictures that shape is unknown, and the tiles' boxes are NaN.
    """

    name: str = "internvl"
    model_types: tuple[str, ...] = ("internvl",)
    prompt: str = "<IMG_CONTEXT>\n{question}"
    whole: int = -1

    def visual_mask(self, model: Any, input_ids: Tensor) -> Tensor:
        return input_ids == image_token(model.config)

    def tokens(
        self,
        model: Any,
        ids: np.ndarray,
        position: np.ndarray,
        inputs: Mapping[str, Any],
        first_image: int,
        sizes: Sequence[tuple[int, int]] | None,
    ) -> tuple[VisualTokens, int]:
        side, view = side_of(model.config), one(model.config.vision_config.image_size)
        pictures = runs(position)
        parts = []
        for image, run in enumerate(pictures):
            check_whole_tiles(run, side * side)
            tiles = len(run) // side**2 - 1
            if tiles == 1:
                raise DartLabError(
                    "two pictures with no token between them cannot be told from one picture of two tiles; "
                    "write each between its own image tags"
                )
            known = sizes is not None and first_image + image < len(sizes)
            size = sizes[first_image + image] if sizes is not None and known else (view, view)
            grid = (0, 0) if not tiles else compat.tile_grid(size, view, tiles) if known else None
            parts.append(tiled(run, image, side, grid, size))
        return VisualTokens.join(parts), len(pictures)

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        return rows_by_crops(samples)

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        return None


INTERNVL = InternVL()
