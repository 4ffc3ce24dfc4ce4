"""LLaVA-NeXT and LLaVA-OneVision: a base view of the picture, then tiles stitched row by row, newlines behind the rows.

The model itself says where the tokens lie: numbers that name places go through its own `pack_image_features` in place
of features, so that unpadding, newlines and OneVision's shrinking of large pictures come out as the model does them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import torch

from dart_lab.errors import DartLabError
from dart_lab.vlm.families.base import fill_pictures, image_token
from dart_lab.vlm.families.order import prompt_order
from dart_lab.vlm.families.videos import VIDEO_PIXELS, video_frames, video_token, visual_of_both
from dart_lab.vlm.layout import BLENDED, NEWLINE, NO_PATCH, PATCH, VisualTokens, raster

_X, _Y, _NEWLINE = range(3)  # channels that go through the packing: centre of a patch in patches, and a mark
_POOLED = 2  # patches a side that become one token of a video
_DIGITS = 6  # of a centre that interpolation made


@dataclass(frozen=True)
class AnyRes:
    """Adapter for `LlavaNextForConditionalGeneration` and `LlavaOnevisionForConditionalGeneration`, the latter's videos
    too.

    Crop 0 is the base view (the picture stretched over a square), crops 1, 2 … the tiles in raster order. Row and
    column count within the crop, among those that unpadding left. A newline belongs to the crop before it.
    A frame of a video is stretched over a square, its patches pooled two by two; one newline, of the last frame, ends
    the video.
    """

    name: str
    model_types: tuple[str, ...]
    prompt: str
    whole: int = 0

    def visual_mask(self, model: Any, input_ids: torch.Tensor) -> torch.Tensor:
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
        batch, video = inputs["input_ids"].cpu().numpy(), video_token(model.config)
        if video is None or not (batch == video).any():
            return fill_pictures(position, self._pictures(model, inputs, first_image, sizes), "image_sizes")
        shown = self._in_order(model, batch, inputs)[first_image:]
        if sizes is not None:
            shown = [_stretched(picture, size) for picture, size in zip(shown, sizes[first_image:], strict=False)]
        return fill_pictures(position, [tokens for tokens, _ in shown], f"image_sizes and {VIDEO_PIXELS}")

    def _in_order(
        self, model: Any, batch: np.ndarray, inputs: Mapping[str, Any]
    ) -> list[tuple[VisualTokens, tuple[int, int]]]:
        """The tokens of every picture and video of the batch, in the order of the prompts, and the (width, height) in
        whose pixels their boxes are.
        """
        image, video = image_token(model.config), video_token(model.config)
        view = model.config.vision_config.image_size
        known: dict[int, list[tuple[VisualTokens, tuple[int, int]]]] = {image: []}
        if (batch == image).any():
            own = [(width, height) for height, width in _sizes(inputs)]
            known[image] = list(zip(self._pictures(model, inputs, 0, own), own, strict=True))
        if video is not None:
            films = video_frames(inputs, needed=bool((batch == video).any()))
            known[video] = [(_video(model, frames), (view, view)) for frames in films]
        lengths = {kind: [len(tokens) for tokens, _ in pictures] for kind, pictures in known.items()}
        return [known[kind][number] for kind, number in prompt_order(batch, lengths)]

    def _pictures(
        self, model: Any, inputs: Mapping[str, Any], first: int, sizes: Sequence[tuple[int, int]] | None
    ) -> Iterator[VisualTokens]:
        known = _sizes(inputs)
        tiles = _rows(model, inputs)
        for image, (height, width) in enumerate(known[first:], start=first):
            own = (width, height) if sizes is None else sizes[image]
            yield _picture(model, (height, width), tiles[image] - 1, own)

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        rows = iter(_rows(model, inputs) if inputs.get("image_sizes") is not None else [])
        out = []
        for tokens in samples:
            for image in np.unique(tokens.image):
                own = tokens.image == image
                has_patches = tokens.patch is not None and bool((tokens.patch[own] >= 0).any())  # a base view
                out.append(next(rows) if has_patches else int(tokens.frame[own].max()) + 1)
        return out

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        if inputs.get("image_sizes") is None:
            return None
        sizes = _sizes(inputs)
        out = []
        for (height, width), rows in zip(sizes, _rows(model, inputs), strict=True):
            whole = np.array([[0.0, 0.0, 1.0, 1.0]])
            if rows > 1:
                down, across = _tile_grid(model, (height, width))
                _, _, box = raster(down, across, across, down)
                view = model.config.vision_config.image_size
                box = _unstretch(box * view, (across * view, down * view), (width, height))
                whole = np.concatenate([whole, box / np.array([width, height] * 2)])
            out.append(whole)
        return out


def _sizes(inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(height, width) of every picture of the batch."""
    sizes = inputs.get("image_sizes")
    if sizes is None:
        raise DartLabError("the prompt has pictures but no image_sizes; pass what the processor returned")
    return [(int(height), int(width)) for height, width in torch.as_tensor(sizes).tolist()]


def _rows(model: Any, inputs: Mapping[str, Any]) -> list[int]:
    """Rows of the tower's input that each picture of the batch occupies: the base view and its tiles."""
    sizes = _sizes(inputs)
    counts = inputs.get("batch_num_images")  # OneVision gives tiles only to a prompt's single picture
    alone = [n == 1 for n in counts.tolist() for _ in range(n)] if counts is not None else [True] * len(sizes)
    count = _module(model).image_size_to_num_patches
    pinpoints, view = model.config.image_grid_pinpoints, model.config.vision_config.image_size
    return [count(list(size), pinpoints, view) if tiled else 1 for size, tiled in zip(sizes, alone, strict=True)]


def _module(model: Any) -> Any:
    """The module of transformers that defines the model."""
    return sys.modules[type(model).__module__]


def _tile_grid(model: Any, size: tuple[int, int]) -> tuple[int, int]:
    """Tiles down and across of a picture of `size` (height, width)."""
    view = model.config.vision_config.image_size
    down, across = _module(model).get_anyres_image_grid_shape(list(size), model.config.image_grid_pinpoints, view)
    return int(down), int(across)


def _picture(model: Any, size: tuple[int, int], tiles: int, original: tuple[int, int]) -> VisualTokens:
    """The tokens of one picture of `size` (height, width), boxes in pixels of `original` (width, height)."""
    view = model.config.vision_config.image_size
    side = view // model.config.vision_config.patch_size
    row, column, box = raster(side, side, *original)
    parts = [_tokens(row, column, np.zeros(side * side, dtype=np.int64), box, row * side + column)]
    packed = _pack(model, size, tiles, side)[side * side :]
    newline = packed[:, _NEWLINE] > 0
    if not tiles:  # a single view ends in one newline
        return VisualTokens.join([*parts, _newlines(np.zeros(int(newline.sum()), dtype=np.int64))])
    rows, columns = _tile_grid(model, size)
    crop, row, column, box, patch = _places(packed, newline, side, columns)
    canvas = (columns * view, rows * view)
    box = _unstretch(box * (view / side), canvas, (size[1], size[0]))
    box *= np.array([original[0] / size[1], original[1] / size[0]] * 2)
    tokens = _tokens(row, column, crop, box, patch)
    tokens.kind[newline] = NEWLINE
    return VisualTokens.join([*parts, tokens])


def _video(model: Any, frames: int) -> VisualTokens:
    """The tokens of a video, boxes in pixels of the model's view."""
    view = model.config.vision_config.image_size
    side = ceil(view // model.config.vision_config.patch_size / _POOLED)
    row, column, box = (np.concatenate([part] * frames) for part in raster(side, side, view, view))
    crop, patch = np.zeros(len(row), dtype=np.int64), np.full(len(row), BLENDED)
    tokens = VisualTokens.join([_tokens(row, column, crop, box, patch), _newlines(crop[:1])])
    frame = np.append(np.arange(frames).repeat(side * side), frames - 1)
    return replace(tokens, frame=frame)


def _stretched(
    picture: tuple[VisualTokens, tuple[int, int]], size: tuple[int, int]
) -> tuple[VisualTokens, tuple[int, int]]:
    """The same picture with its boxes in the pixels of another `size` (width, height)."""
    tokens, view = picture
    return replace(tokens, box=tokens.box * np.array([size[0] / view[0], size[1] / view[1]] * 2)), size


def _pack(model: Any, size: tuple[int, int], tiles: int, side: int) -> np.ndarray:
    """`(tokens, 3)`: where the model puts the patches of a picture, the base view first."""
    rows, columns = _tile_grid(model, size) if tiles else (0, 0)
    y, x = (part + 0.5 for part in np.mgrid[: rows * side, : columns * side].astype(np.float64))
    stitched = np.stack([x, y, np.zeros_like(x)], axis=-1).reshape(rows, side, columns, side, 3)
    crops = stitched.transpose(0, 2, 1, 3, 4).reshape(tiles, side * side, 3)
    features = torch.from_numpy(np.concatenate([np.zeros((1, side * side, 3)), crops]))
    mark = torch.zeros(3, dtype=features.dtype)
    mark[_NEWLINE] = 1
    config, given = model.config, {}
    if hasattr(config, "vision_aspect_ratio"):
        given["vision_aspect_ratio"] = config.vision_aspect_ratio
    else:
        given["vision_feature_select_strategy"] = config.vision_feature_select_strategy
    packed, _ = model.model.pack_image_features([features], [list(size)], image_newline=mark, **given)
    return np.asarray(packed[0] if isinstance(packed, list) else packed)


def _places(
    packed: np.ndarray, newline: np.ndarray, side: int, columns: int
) -> tuple[np.ndarray, ...]:
    """Crop, row, column, box in patches of the stitched tiles, and patch number, of the tokens behind the base."""
    x, y = (packed[:, channel].round(_DIGITS) for channel in (_X, _Y))
    across, down = np.unique(x[~newline]), np.unique(y[~newline])
    step_x = across[1] - across[0] if len(across) > 1 else down[1] - down[0] if len(down) > 1 else 1.0
    step_y = down[1] - down[0] if len(down) > 1 else step_x
    tile_x, tile_y = (np.floor(part / side).astype(np.int64) for part in (x, y))
    crop = 1 + tile_y * columns + tile_x
    row = _rank(y, tile_y, down, side)
    column = _rank(x, tile_x, across, side)
    box = np.stack([x - step_x / 2, y - step_y / 2, x + step_x / 2, y + step_y / 2], axis=1)
    patch = np.floor(y % side) * side + np.floor(x % side) if step_x == step_y == 1 else np.full(len(x), BLENDED)
    before = np.maximum.accumulate(np.where(newline, 0, np.arange(len(x))))
    crop = crop[before]
    row[newline] = column[newline] = -1
    box[newline] = np.nan
    return crop, row, column, box, np.where(newline, NO_PATCH, patch).astype(np.int64)


def _rank(value: np.ndarray, tile: np.ndarray, known: np.ndarray, side: int) -> np.ndarray:
    """Number of each line among the lines of its tile."""
    first = np.searchsorted(known, tile * side)
    return np.searchsorted(known, value) - first


def _unstretch(box: np.ndarray, canvas: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """Boxes on the padded canvas → boxes on the picture of `size` (width, height), which it was resized from."""
    scale = (canvas[0] / size[0], canvas[1] / size[1])
    if scale[0] < scale[1]:
        resized = (canvas[0], min(ceil(size[1] * scale[0]), canvas[1]))
    else:
        resized = (min(ceil(size[0] * scale[1]), canvas[0]), canvas[1])
    padding = np.array([(canvas[0] - resized[0]) // 2, (canvas[1] - resized[1]) // 2] * 2)
    placed = (box - padding) * np.array([size[0] / resized[0], size[1] / resized[1]] * 2)
    return np.clip(placed, 0, np.array(size * 2))


def _tokens(
    row: np.ndarray, column: np.ndarray, crop: np.ndarray, box: np.ndarray, patch: np.ndarray
) -> VisualTokens:
    n = len(row)
    zero = np.zeros(n, dtype=np.int64)
    return VisualTokens(
        position=zero, image=zero, frame=zero, crop=crop, row=row, column=column,
        kind=np.full(n, PATCH, dtype=np.result_type(np.array(PATCH), np.array(NEWLINE))), box=box, patch=patch,
    )  # fmt: skip


def _newlines(crop: np.ndarray) -> VisualTokens:
    n = len(crop)
    nowhere = np.full(n, -1, dtype=np.int64)
    tokens = _tokens(nowhere, nowhere, crop, np.full((n, 4), np.nan), np.full(n, NO_PATCH))
    tokens.kind[:] = NEWLINE
    return tokens


LLAVA_NEXT = AnyRes("llava-next", ("llava_next",), "USER: <image>\n{question} ASSISTANT:")
LLAVA_ONEVISION = AnyRes(
    "llava-onevision", ("llava_onevision",),
    "<|im_start|>user <image>\n{question}<|im_end|><|im_start|>assistant\n",
)  # fmt: skip
