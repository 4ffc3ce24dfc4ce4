"""Video-LLaVA: square pictures as in LLaVA-1.5, and videos of square frames, each with the tower's class token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.vlm.families.base import fill_pictures
from dart_lab.vlm.families.llava import square_frames
from dart_lab.vlm.families.order import prompt_order
from dart_lab.vlm.families.videos import rows_by_frames, video_frames, visual_of_both
from dart_lab.vlm.layout import VisualTokens


@dataclass(frozen=True)
class VideoLlava:
    """Adapter for `VideoLlavaForConditionalGeneration`, pictures and videos.

    A frame of a video is a class token, of kind "cls" and without a place, and then its patches. A picture has a class
    token only where the config selects "full" features.
    """

    name: str = "video-llava"
    model_types: tuple[str, ...] = ("video_llava",)
    prompt: str = "USER: <image>\n{question} ASSISTANT:"
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
        vision, batch = model.config.vision_config, inputs["input_ids"].cpu().numpy()
        image, video = model.config.image_token_id, model.config.video_token_id
        frames = video_frames(inputs, needed=bool((batch == video).any()))
        patches = (vision.image_size // vision.patch_size) ** 2
        has_cls = model.config.vision_feature_select_strategy == "full"
        each = {image: patches + has_cls, video: patches + 1}
        pictures = int((batch == image).sum()) // each[image]
        order = prompt_order(
            batch, {image: [each[image]] * pictures, video: [count * each[video] for count in frames]}
        )
        view = vision.image_size
        shown = []
        for number, (kind, index) in enumerate(order[first_image:], start=first_image):
            size = (view, view) if sizes is None else sizes[number]
            shown.append(
                square_frames(vision, True, size, frames[index])
                if kind == video
                else square_frames(vision, has_cls, size)
            )
        return fill_pictures(position, shown, f"{each[image]} tokens, or videos of {each[video]} a frame")

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        return rows_by_frames(samples)

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        return None


VIDEO_LLAVA = VideoLlava()
