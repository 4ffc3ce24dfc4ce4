"""LLaVA-1.5: one square view of the picture, g × g patches in raster order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.vlm.families.base import fill_pictures, image_token
from dart_lab.vlm.families.tiles import rows_by_crops
from dart_lab.vlm.layout import CLS, PATCH, VisualTokens, raster


@dataclass(frozen=True)
class Llava:
    """Adapter for `LlavaForConditionalGeneration` with a CLIP, SigLIP or DINOv2 tower."""

    name: str = "llava"
    model_types: tuple[str, ...] = ("llava",)
    prompt: str = "USER: <image>\n{question} ASSISTANT:"
    whole: int = 0

    def visual_mask(self, model: Any, input_ids: Tensor) -> Tensor:
        return input_ids == image_token(model.config)

    def tokens(
        self,
        model: Any,
        ids: np.ndarray,
        position: np.ndarray,
        inputs: Any,
        first_image: int,
        sizes: Sequence[tuple[int, int]] | None,
    ) -> tuple[VisualTokens, int]:
        vision = model.config.vision_config
        has_cls = model.config.vision_feature_select_strategy == "full" and "siglip" not in vision.model_type
        per_image = (vision.image_size // vision.patch_size) ** 2 + has_cls
        view = (vision.image_size,) * 2
        shown = (
            square_frames(vision, has_cls, view if sizes is None else sizes[first_image + number])
            for number in range(ceil(len(position) / per_image))
        )
        return fill_pictures(position, shown, str(per_image))

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        return rows_by_crops(samples)

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        return None


def square_frames(vision: Any, has_cls: bool, size: tuple[int, int], frames: int = 1) -> VisualTokens:
    """The tokens of a square picture, or of a video of square `frames`, in raster order, each led by its class token if
    it `has_cls`. Boxes are in pixels of the original, whose `size` is (width, height).
    """
    side = vision.image_size // vision.patch_size
    row, column, box = raster(side, side, vision.image_size, vision.image_size)
    box, kind = _uncropped(box, vision.image_size, size), np.full(side * side, PATCH)
    if has_cls:
        row, column, kind = np.append(-1, row), np.append(-1, column), np.append(CLS, kind)
        box = np.concatenate([np.full((1, 4), np.nan), box])
    zero = np.zeros(frames * len(row), dtype=np.int64)
    return VisualTokens(
        position=zero, image=zero, frame=np.arange(frames).repeat(len(row)), crop=zero, row=np.tile(row, frames),
        column=np.tile(column, frames), kind=np.tile(kind, frames), box=np.tile(box, (frames, 1)),
    )  # fmt: skip


def _uncropped(box: np.ndarray, view: int, size: tuple[int, int]) -> np.ndarray:
    """Undo CLIP's resize of the shortest side and centre crop: pixels of the view → pixels of the picture."""
    short = min(size)
    offset = np.array([(size[0] - short) / 2, (size[1] - short) / 2] * 2)
    return box * (short / view) + offset


LLAVA = Llava()
