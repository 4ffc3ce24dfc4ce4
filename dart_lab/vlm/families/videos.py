"""What families with videos share: their placeholder, their frames, their rows of the tower's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm.families.base import image_token
from dart_lab.vlm.layout import VisualTokens

VIDEO_PIXELS = "pixel_values_videos"  # `(videos, frames, channels, height, width)` where each frame is a picture


def video_token(config: Any) -> int | None:
    """The id of the video placeholder, under its newer or older name; None for a model that has none."""
    token = getattr(config, "video_token_id", None)
    return getattr(config, "video_token_index", None) if token is None else int(token)


def visual_of_both(config: Any, input_ids: Tensor) -> Tensor:
    """`(batch, sequence)` bool: placeholders of pictures and of videos."""
    visual = input_ids == image_token(config)
    video = video_token(config)
    return visual if video is None else visual | (input_ids == video)


def video_frames(inputs: Mapping[str, Any], *, needed: bool) -> list[int]:
    """Frames of every video of the batch.

    Raises:
        DartLabError: they are `needed`, and the inputs have no videos.
    """
    pixels = inputs.get(VIDEO_PIXELS)
    if pixels is None and needed:
        raise DartLabError(f"the prompt has videos but no {VIDEO_PIXELS}; pass what the processor returned")
    return [] if pixels is None else [int(pixels.shape[1])] * int(pixels.shape[0])


def rows_by_frames(samples: Sequence[VisualTokens]) -> list[int]:
    """Frames of each picture or video of the batch, which are its rows of the tower's input."""
    return [
        int(tokens.frame[tokens.image == image].max()) + 1 for tokens in samples for image in np.unique(tokens.image)
    ]
