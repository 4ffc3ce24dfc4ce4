"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any shape, patches merged 2 × 2, raster order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm.families.base import fill_pictures
from dart_lab.vlm.layout import PATCH, VisualTokens, raster, unknown_place

_GRIDS = "image_grid_thw"


@dataclass(frozen=True)
class Qwen:
    """Adapter for the three `Qwen…VLForConditionalGeneration` classes, still pictures only."""

    name: str = "qwen-vl"
    model_types: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    prompt: str = "<image>\n{question}"
    whole: int = 0

    def visual_mask(self, model: Any, input_ids: Tensor) -> Tensor:
        if bool((input_ids == model.config.video_token_id).any()):
            raise DartLabError("the prompt holds a video, and only pictures are supported for Qwen-VL; give its frames")
        return input_ids == model.config.image_token_id

    def tokens(
        self,
        model: Any,
        ids: np.ndarray,
        position: np.ndarray,
        inputs: Mapping[str, Any],
        first_image: int,
        sizes: Sequence[tuple[int, int]] | None,
    ) -> tuple[VisualTokens, int]:
        if not len(position):
            return unknown_place(position), 0
        grids = inputs.get(_GRIDS)
        if grids is None:
            raise DartLabError("the prompt has pictures but no image_grid_thw; pass what the processor returned")
        return fill_pictures(position, self._pictures(model, grids[first_image:].tolist(), first_image, sizes), _GRIDS)

    def _pictures(
        self, model: Any, grids: list[list[int]], first: int, sizes: Sequence[tuple[int, int]] | None
    ) -> Iterator[VisualTokens]:
        vision = model.config.vision_config
        merge, cell = vision.spatial_merge_size, vision.spatial_merge_size * vision.patch_size
        for image, (_, height, width) in enumerate(grids, start=first):
            rows, columns = height // merge, width // merge
            # the processor stretches the whole picture over the grid, so the cells divide the original evenly
            view = (columns * cell, rows * cell) if sizes is None else sizes[image]
            row, column, box = raster(rows, columns, *view)
            zero = np.zeros(len(row), dtype=np.int64)
            yield VisualTokens(
                position=zero, image=zero, frame=zero, crop=zero, row=row, column=column,
                kind=np.full(len(row), PATCH), box=box,
            )  # fmt: skip

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        grids = inputs.get(_GRIDS)
        return None if grids is None else [int(rows) for rows in grids.prod(dim=1)]

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        return None


QWEN = Qwen()
