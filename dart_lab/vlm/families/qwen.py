"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures and videos of any shape, patches merged 2 × 2, raster order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm.families.base import fill_pictures
from dart_lab.vlm.families.order import prompt_order
from dart_lab.vlm.families.videos import visual_of_both
from dart_lab.vlm.layout import PATCH, VisualTokens, raster

_IMAGE_GRIDS, _VIDEO_GRIDS = "image_grid_thw", "video_grid_thw"
_KINDS = {_IMAGE_GRIDS: "pictures", _VIDEO_GRIDS: "videos"}


@dataclass(frozen=True)
class Qwen:
    """Adapter for the three `Qwen…VLForConditionalGeneration` classes, pictures and videos.

    A `frame` is one step of a video's temporal grid, for which the tower merges `temporal_patch_size` frames of the
    video. Text between the steps, where Qwen3-VL writes their times, is no visual token.
    """

    name: str = "qwen-vl"
    model_types: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    prompt: str = "<image>\n{question}"
    whole: int = 0

    def visual_mask(self, model: Any, input_ids: Tensor) -> Tensor:
        return visual_of_both(model.config, input_ids)

    def tokens(
        self,
        model: Any,
        ids: np.ndarray,
        position: np.ndarray,
        inputs: Mapping[str, Any],
        first_image: int,
        sizes: Sequence[tuple[int, int]] | None,
    ) -> tuple[VisualTokens, int]:
        merge = model.config.vision_config.spatial_merge_size
        grids, present = {}, set(ids[position].tolist())
        config = model.config
        for token, name in ((config.image_token_id, _IMAGE_GRIDS), (config.video_token_id, _VIDEO_GRIDS)):
            given = inputs.get(name)
            if token in present and given is None:
                raise DartLabError(f"the prompt has {_KINDS[name]} but no {name}; pass what the processor returned")
            grids[token] = [] if given is None else given.tolist()
        lengths = {token: [prod(grid) // merge**2 for grid in known] for token, known in grids.items()}
        order = prompt_order(inputs["input_ids"].cpu().numpy(), lengths)
        shown = [grids[token][number] for token, number in order[first_image:]]
        source = " and ".join(name for name in (_IMAGE_GRIDS, _VIDEO_GRIDS) if inputs.get(name) is not None)
        return fill_pictures(position, self._pictures(model, shown, first_image, sizes), source)

    def _pictures(
        self, model: Any, grids: list[list[int]], first: int, sizes: Sequence[tuple[int, int]] | None
    ) -> Iterator[VisualTokens]:
        vision = model.config.vision_config
        merge, cell = vision.spatial_merge_size, vision.spatial_merge_size * vision.patch_size
        for image, (steps, height, width) in enumerate(grids, start=first):
            rows, columns = height // merge, width // merge
            # the processor stretches the whole picture over the grid, so the cells divide the original evenly
            view = (columns * cell, rows * cell) if sizes is None else sizes[image]
            row, column, box = raster(rows, columns, *view)
            frame = np.arange(steps).repeat(rows * columns)
            zero = np.zeros(len(frame), dtype=np.int64)
            yield VisualTokens(
                position=zero, image=zero, frame=frame, crop=zero, row=np.tile(row, steps),
                column=np.tile(column, steps), kind=np.full(len(frame), PATCH), box=np.tile(box, (steps, 1)),
            )  # fmt: skip

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        patches = model.config.vision_config.spatial_merge_size**2
        return [patches * int((tokens.image == image).sum()) for tokens in samples for image in np.unique(tokens.image)]

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        return None


QWEN = Qwen()
