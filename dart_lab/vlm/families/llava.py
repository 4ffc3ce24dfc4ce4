"""LLaVA-1.5: one square view of the picture, g × g patches in raster order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm.families.base import image_token
from dart_lab.vlm.families.tiles import rows_by_crops
from dart_lab.vlm.layout import CLS, PATCH, VisualTokens, raster, unknown_place


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
        side = vision.image_size // vision.patch_size
        has_cls = model.config.vision_feature_select_strategy == "full" and "siglip" not in vision.model_type
        per_image = side * side + has_cls
        images, rest = divmod(len(position), per_image)
        if rest:
            raise DartLabError(
                f"{len(position)} visual tokens are not whole images of {per_image}: the prompt cuts an image "
                "(a truncated prompt or chunked prefill); leave the image whole"
            )
        if not images:
            return unknown_place(position), 0
        parts = []
        for image in range(images):
            here = position[image * per_image : (image + 1) * per_image]
            row, column, box = raster(side, side, vision.image_size, vision.image_size)
            if sizes is not None:
                box = uncropped(box, vision.image_size, sizes[first_image + image])
            kind = np.full(side * side, PATCH)
            if has_cls:
                row, column = np.append(-1, row), np.append(-1, column)
                kind, box = np.append(CLS, kind), np.concatenate([np.full((1, 4), np.nan), box])
            same = np.zeros(per_image, dtype=np.int64)
            parts.append(
                VisualTokens(
                    position=here.astype(np.int64),
                    image=same + image,
                    frame=same,
                    crop=same,
                    row=row,
                    column=column,
                    kind=kind,
                    box=box,
                )
            )
        return VisualTokens.join(parts), images

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        return rows_by_crops(samples)

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        return None


def uncropped(box: np.ndarray, view: int, size: tuple[int, int]) -> np.ndarray:
    """Undo CLIP's resize of the shortest side and centre crop: pixels of the view → pixels of the picture."""
    short = min(size)
    offset = np.array([(size[0] - short) / 2, (size[1] - short) / 2] * 2)
    return box * (short / view) + offset


LLAVA = Llava()
