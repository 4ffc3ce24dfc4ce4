"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any shape, patches merged 2 × 2, raster order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm.layout import PATCH, VisualTokens, raster, unknown_place


@dataclass(frozen=True)
class Qwen:
    """Adapter for the three `Qwen…VLForConditionalGeneration` classes, still pictures only."""

    name: str = "qwen-vl"
    model_types: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    prompt: str = "<image>\n{question}"

    def visual_mask(self, model: Any, input_ids: Tensor) -> Tensor:
        if bool((input_ids == model.config.video_token_id).any()):
            raise DartLabError("the prompt holds a video, and only pictures are supported for Qwen-VL; give its frames")
        return input_ids == model.config.image_token_id

    def tokens(
        self,
        model: Any,
        position: np.ndarray,
        inputs: Mapping[str, Any],
        first_image: int,
        sizes: Sequence[tuple[int, int]] | None,
    ) -> tuple[VisualTokens, int]:
        if not len(position):
            return unknown_place(position), 0
        grids = inputs.get("image_grid_thw")
        if grids is None:
            raise DartLabError("the prompt has pictures but no image_grid_thw; pass what the processor returned")
        vision = model.config.vision_config
        merge, cell = vision.spatial_merge_size, vision.spatial_merge_size * vision.patch_size
        parts: list[VisualTokens] = []
        used = 0
        for _, height, width in grids[first_image:].tolist():
            if used >= len(position):
                break
            rows, columns = height // merge, width // merge
            here = position[used : used + rows * columns]
            if len(here) < rows * columns:
                break
            image = len(parts)
            # the processor stretches the whole picture over the grid, so the cells divide the original evenly
            view = (columns * cell, rows * cell) if sizes is None else sizes[first_image + image]
            row, column, box = raster(rows, columns, *view)
            zero = np.zeros(len(here), dtype=np.int64)
            parts.append(
                VisualTokens(
                    position=here.astype(np.int64),
                    image=zero + image,
                    frame=zero,
                    crop=zero,
                    row=row,
                    column=column,
                    kind=np.full(len(here), PATCH),
                    box=box,
                )
            )
            used += len(here)
        if used != len(position):
            raise DartLabError(
                f"{len(position)} visual tokens are not whole images of image_grid_thw: the prompt cuts an image "
                "(a truncated prompt or chunked prefill); leave the image whole"
            )
        return VisualTokens.join(parts), len(parts)

    def pixel_rows(self, images: int) -> int | None:
        return None  # patches of all pictures lie behind one another, a different number for each


QWEN = Qwen()
