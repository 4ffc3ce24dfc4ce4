"""Pictures cut into tiles: row by row, each tile's patches folded into fewer tokens, the whole picture last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dart_lab.errors import DartLabError
from dart_lab.vlm.layout import PATCH, VisualTokens, raster

CUT = "the prompt cuts an image (a truncated prompt or chunked prefill); leave the image whole"


def folded(config: Any) -> int:
    """Patches a side that become one token behind the tower (pixel shuffle); 1 for a model that does not fold."""
    ratio = getattr(config, "downsample_ratio", None)
    return int(getattr(config, "scale_factor", 1)) if ratio is None else round(1 / ratio)


def side_of(config: Any) -> int:
    """Tokens a side of one tile."""
    return one(config.vision_config.image_size) // one(config.vision_config.patch_size) // folded(config)


def tokens_of_tile(config: Any) -> int:
    """Tokens that go on of one tile: those of its grid, or the queries of a resampler."""
    return int(getattr(config, "query_num", 0)) or side_of(config) ** 2


def one(size: int | Sequence[int]) -> int:
    """The side of a square, which some configs write as (height, width).

    >>> one(448), one((448, 448))
    (448, 448)
    """
    return int(size if isinstance(size, int) else size[0])


def runs(position: np.ndarray) -> list[np.ndarray]:
    """Split ascending positions where they do not follow one another.

    >>> [run.tolist() for run in runs(np.array([3, 4, 5, 9, 10]))]
    [[3, 4, 5], [9, 10]]
    """
    return np.split(position, np.flatnonzero(np.diff(position) != 1) + 1)


def tiled(
    position: np.ndarray, image: int, side: int, grid: tuple[int, int] | None, size: tuple[int, int]
) -> VisualTokens:
    """The tokens of one picture that is stretched over a grid of tiles, and shown whole after them.

    Args:
        position: `(crops · side²,)` positions of its tokens in the prompt.
        image: its number within the sample.
        side: tokens a side of a tile.
        grid: tiles down and across, (0, 0) for a picture shown whole only; None: unknown, so that the tiles' boxes are
            NaN.
        size: (width, height) of the picture, in whose pixels the boxes are.

    Returns:
        Crops 0, 1 … are the tiles, row by row; the last crop is the whole picture.
    """
    row, column, box = raster(side, side, 1.0, 1.0)
    cells = side * side
    tiles = len(position) // cells - 1
    down, across = grid or (1, 1)
    crop = np.arange(tiles + 1).repeat(cells)
    shares = np.tile(box, (tiles + 1, 1))
    corner = np.stack([crop % max(across, 1), crop // max(across, 1)] * 2, axis=1)[: tiles * cells]
    shares[: tiles * cells] = (shares[: tiles * cells] + corner) / np.array([max(across, 1), max(down, 1)] * 2)
    if grid is None:
        shares[: tiles * cells] = np.nan
    zero = np.zeros(len(position), dtype=np.int64)
    return VisualTokens(
        position=position.astype(np.int64), image=zero + image, frame=zero, crop=crop,
        row=np.tile(row, tiles + 1), column=np.tile(column, tiles + 1),
        kind=np.full(len(position), PATCH), box=shares * np.array(size * 2),
    )  # fmt: skip


def check_whole_tiles(run: np.ndarray, per_tile: int) -> None:
    """Raise `DartLabError` unless a run of visual tokens is made up of whole tiles."""
    if len(run) % per_tile:
        raise DartLabError(f"{len(run)} visual tokens are not whole tiles of {per_tile}: {CUT}")


def rows_by_crops(samples: Sequence[VisualTokens]) -> list[int]:
    """Crops of each picture of the batch, which are its rows of the tower's input."""
    return [
        int(tokens.crop[tokens.image == image].max()) + 1 for tokens in samples for image in np.unique(tokens.image)
    ]
