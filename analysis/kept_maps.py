"""Maps of how often each place is kept: from a trace, held against chance and against flipped pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dart_lab.errors import DartLabError
from dart_lab.studies.statistics import bootstrap_by_image, correlation, gini, jackknife, kl_from_uniform

Floats = NDArray[np.float64]

_LEVEL = 0.95
_TOLERANCE = 1e-6  # of the retention ratio, for sums in floating point
_DIGITS = 6  # significant digits of a number in the facts
_THIRD = 2 / 3  # where the bottom third of a picture begins


@dataclass(frozen=True, eq=False)
class KeptMaps:
    """Kept maps of one method and budget, one a sample.

    Attributes:
        maps: `(samples, rows, columns)`, the share of each cell that is kept: 0 or 1 where all samples have this grid.
        grids: rows and columns of each sample's own grid.
        counts: cells each sample keeps on that grid.
        image_ids: which picture each sample shows.
        asked, got: mean numbers of visual tokens asked for and kept, over the whole sample.
    """

    maps: Floats
    grids: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    image_ids: tuple[str, ...]
    asked: float
    got: float

    @property
    def retention_ratio(self) -> float:
        """Mean over samples of kept cells / cells."""
        return _mean_share(self.counts, self.grids)


@dataclass(frozen=True, eq=False)
class Null:
    """What a uniform sampler with the same grids and counts gives: 2.5 % and 97.5 % quantiles, `(2, …)` each."""

    cells: Floats
    values: Floats
    kl: Floats
    gini: Floats


def kept_maps(table: pd.DataFrame) -> KeptMaps:
    """Kept maps from the rows of one method, budget and flip.

    Counted are the tokens of each sample's first picture, first frame and first crop that lie on its grid. If grids
    differ, all are brought to the smallest number of rows and of columns that occurs, in relative coordinates: a cell
    is shared out among the bins it overlaps, by area, which leaves the mean of every map as it was.

    Raises:
        DartLabError: fewer than two samples, a grid with holes, or a map whose mean is not the retention ratio.
    """
    rows = table[(table["image"] == 0) & (table["frame"] == 0) & (table["crop"] == 0) & (table["row"] >= 0)]
    masks, image_ids, asked, got = [], [], [], []
    for _, part in rows.groupby("sample", sort=True):
        masks.append(_mask(part))
        image_ids.append(str(part["image_id"].iloc[0]))
        asked.append(int(part["asked"].iloc[0]))
        got.append(int(part["got"].iloc[0]))
    if len(masks) < 2:
        raise DartLabError(f"{len(masks)} samples with visual tokens on a grid; a map with intervals needs at least 2")
    grids = tuple((int(m.shape[0]), int(m.shape[1])) for m in masks)
    size = (min(g[0] for g in grids), min(g[1] for g in grids))
    counts = tuple(int(m.sum()) for m in masks)
    maps = np.stack([regrid(m, *size) for m in masks])
    # where the crop is the whole sample, the run's own count of kept tokens must agree
    _check_mean(maps, _mean_share(got if len(rows) == len(table) else counts, grids))
    return KeptMaps(maps, grids, counts, tuple(image_ids), float(np.mean(asked)), float(np.mean(got)))


def regrid(mask: Floats, rows: int, columns: int) -> Floats:
    """Bring a map to another grid in relative coordinates, by area; the mean stays.

    >>> regrid(np.array([[1.0], [0.0], [0.0]]), 2, 1).round(3).tolist()
    [[0.667], [0.0]]
    """
    if mask.shape == (rows, columns):
        return mask
    down, across = _overlap(mask.shape[0], rows), _overlap(mask.shape[1], columns)
    return np.asarray(down @ mask @ across.T)


def uniform_null(maps: KeptMaps, *, draws: int, seed: int) -> Null:
    """Quantiles of what `describe` reports over `draws` draws of as many cells of each sample as it keeps."""
    rng = np.random.default_rng(seed)
    shape = maps.maps.shape[1:]
    cells, values = np.empty((draws, *shape)), np.empty((draws, sum(shape) + 2))
    for i in range(draws):
        drawn = _uniform_maps(maps, rng)
        cells[i] = drawn.mean(axis=0)
        values[i] = _values(drawn).mean(axis=0)
    flat = cells.reshape(draws, -1)
    tails = [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2]
    return Null(*(np.quantile(x, tails, axis=0) for x in (cells, values, kl_from_uniform(flat), gini(flat))))


def describe(maps: KeptMaps, null: Null, *, n_boot: int, seed: int) -> dict[str, Any]:
    """Everything the figure says about one method and budget, as plain numbers.

    `rate` is how often each cell is kept, in units of the retention ratio. Marginals, mean raster index and share of
    the bottom third carry intervals from the bootstrap by image and the band of a uniform sampler. KL and Gini carry
    the band alone: both grow with sampling noise, which a bootstrap would add a second time.
    """
    rows, columns = maps.maps.shape[1:]
    mean = maps.maps.mean(axis=0)
    table = bootstrap_by_image(_values(maps.maps), list(maps.image_ids), n_boot=n_boot, level=_LEVEL, seed=seed)
    low, high = null.values
    stats = {
        "value": table["mean"].to_numpy(), "low": table["low"].to_numpy(), "high": table["high"].to_numpy(),
        "null_low": low, "null_high": high,
    }
    outside = (mean < null.cells[0]) | (mean > null.cells[1])
    return {
        "asked": maps.asked,
        "got": maps.got,
        "retention_ratio": _plain(maps.retention_ratio),
        "rate": _plain(mean / mean.mean()),
        "rows": {name: _plain(x[:rows]) for name, x in stats.items()},
        "columns": {name: _plain(x[rows : rows + columns]) for name, x in stats.items()},
        "mean_raster_index": {name: _plain(x[-2]) for name, x in stats.items()},
        "bottom_third": {name: _plain(x[-1]) for name, x in stats.items()},
        "kl": _with_band(float(kl_from_uniform(mean.ravel())), null.kl),
        "gini": _with_band(float(gini(mean.ravel())), null.gini),
        "cells_outside_chance": _plain(float(outside.mean())),
    }


def content_shift(maps: KeptMaps, flipped: KeptMaps, *, n_boot: int, seed: int) -> dict[str, Any]:
    """Hold the maps against those of the same pictures upside down.

    `canvas`: correlation of the two maps cell by cell, as they lie: 1 if the place decides. `content`: the same after
    the second map is turned back: 1 if the content decides. `index` = canvas − content: above 0 the place, below 0 the
    content. A mean map that is symmetric from top to bottom agrees both ways and leaves the index at 0.

    `maps` correlates the mean maps (intervals: jackknife over images); `pictures` is the mean over samples of the
    correlation of each one's own two kept maps (intervals: bootstrap by image; chance gives 0).

    Raises:
        DartLabError: the two runs do not cover the same samples.
    """
    if maps.maps.shape != flipped.maps.shape or maps.image_ids != flipped.image_ids:
        raise DartLabError(
            f"maps {maps.maps.shape} and flipped maps {flipped.maps.shape} show different samples; run both again"
        )
    n = len(maps.maps)
    a, canvas = maps.maps.reshape(n, -1), flipped.maps.reshape(n, -1)
    content = flipped.maps[:, ::-1].reshape(n, -1)
    codes, images = pd.factorize(np.asarray(maps.image_ids))
    whole = _agreement(a.mean(axis=0), canvas.mean(axis=0), content.mean(axis=0))
    rest = _agreement(*(_without_one(x, codes, len(images)) for x in (a, canvas, content)))
    by_map = jackknife(whole, rest, level=_LEVEL)
    each = bootstrap_by_image(_agreement(a, canvas, content), codes, n_boot=n_boot, level=_LEVEL, seed=seed)
    return {"maps": _by_coordinates(by_map), "pictures": _by_coordinates(each.rename(columns={"mean": "value"}))}


def _by_coordinates(table: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Rows canvas, content, index of a table of intervals as plain numbers."""
    columns = table[["value", "low", "high"]].to_dict("records")
    return {
        name: {str(column): _plain(x) for column, x in row.items()}
        for name, row in zip(("canvas", "content", "index"), columns, strict=True)
    }


def _mask(part: pd.DataFrame) -> Floats:
    """`(rows, columns)` of one sample: 1.0 where kept."""
    row, column = part["row"].to_numpy(), part["column"].to_numpy()
    mask = np.full((row.max() + 1, column.max() + 1), np.nan)
    mask[row, column] = part["kept"].to_numpy()
    if len(part) != mask.size or np.isnan(mask).any():
        raise DartLabError(f"{len(part)} tokens on a grid of {mask.shape[0]}×{mask.shape[1]}: each cell holds one")
    return mask


def _mean_share(counts: Sequence[int], grids: Sequence[tuple[int, int]]) -> float:
    return float(np.mean([kept / (rows * columns) for kept, (rows, columns) in zip(counts, grids, strict=True)]))


def _check_mean(maps: Floats, ratio: float) -> None:
    if abs(float(maps.mean()) - ratio) > _TOLERANCE:
        raise DartLabError(
            f"the mean of the kept map is {maps.mean():.6f}, the retention ratio {ratio:.6f}; the trace is damaged"
        )


def _overlap(source: int, target: int) -> Floats:
    """`(target, source)`: the share of each target bin that each source cell covers; rows sum to 1."""
    low = np.maximum(np.arange(target)[:, None] / target, np.arange(source) / source)
    high = np.minimum((np.arange(target)[:, None] + 1) / target, (np.arange(source) + 1) / source)
    return np.asarray(np.clip(high - low, 0, None) * target)


def _values(maps: Floats) -> Floats:
    """`(samples, rows + columns + 2)`: marginals over the mean rate, raster index, share of the bottom third.

    The raster index of a token is (row · columns + column + ½) / cells, so uniform keeping has mean ½.
    """
    rows, columns = maps.shape[1:]
    total = maps.sum(axis=(1, 2))
    by_row, by_column = maps.mean(axis=2), maps.mean(axis=1)
    raster = (np.arange(rows * columns) + 0.5) / (rows * columns)
    below = np.clip((np.arange(rows) + 1) / rows - np.maximum(np.arange(rows) / rows, _THIRD), 0, None) * rows
    rate = maps.mean()
    index, bottom = maps.reshape(len(maps), -1) @ raster / total, by_row @ below * columns / total
    return np.column_stack([by_row / rate, by_column / rate, index, bottom])


def _uniform_maps(maps: KeptMaps, rng: np.random.Generator) -> Floats:
    """One draw of a uniform sampler: maps of the shape of `maps.maps`."""
    shape = maps.maps.shape
    if len(set(zip(maps.grids, maps.counts, strict=True))) == 1:
        count, flat = maps.counts[0], np.zeros((shape[0], shape[1] * shape[2]))
        lowest = np.argpartition(rng.random(flat.shape), count - 1, axis=1)[:, :count]
        np.put_along_axis(flat, lowest, 1.0, axis=1)
        return flat.reshape(shape)
    out = np.empty(shape)
    for i, ((rows, columns), count) in enumerate(zip(maps.grids, maps.counts, strict=True)):
        mask = np.zeros(rows * columns)
        mask[rng.permutation(rows * columns)[:count]] = 1.0
        out[i] = regrid(mask.reshape(rows, columns), shape[1], shape[2])
    return out


def _without_one(x: Floats, codes: NDArray[Any], images: int) -> Floats:
    """`(images, cells)`: the mean of `x` over the samples of all images but one."""
    sums = np.zeros((images, x.shape[1]))
    np.add.at(sums, codes, x)
    sizes = np.bincount(codes, minlength=images)[:, None]
    return np.asarray((x.sum(axis=0) - sums) / (len(x) - sizes))


def _agreement(a: Floats, canvas: Floats, content: Floats) -> Floats:
    """`(…, 3)`: correlation as they lie, after turning back, and the difference."""
    by_place, by_content = correlation(a, canvas), correlation(a, content)
    return np.stack([by_place, by_content, by_place - by_content], axis=-1)


def _with_band(value: float, band: Floats) -> dict[str, float]:
    return {"value": _plain(value), "null_low": _plain(float(band[0])), "null_high": _plain(float(band[1]))}


def _plain(x: Any) -> Any:
    """Numbers as Python floats with six significant digits, arrays as nested lists."""
    if np.ndim(x):
        return [_plain(item) for item in x]
    return float(f"{float(x):.{_DIGITS}g}")
