"""Intervals and unevenness: how sure a mean is, and how far a distribution is from uniform."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from dart_lab.errors import DartLabError
from dart_lab.studies.bootstrap import Floats, Method, bootstrap_sums, check_level, check_rows


def bootstrap_by_image(
    values: pd.DataFrame | ArrayLike,
    image_ids: ArrayLike | None = None,
    *,
    n_boot: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    method: Method = "percentile",
) -> pd.DataFrame:
    """Mean of every column with an interval; whole images are resampled, not rows.

    Rows of one image stand or fall together: several questions on a picture are not independent.

    Args:
        values: `(rows, columns)` or `(rows,)` finite numbers, one row a sample.
        image_ids: `(rows,)`, which picture a row belongs to. Default: every row its own.
        n_boot: resamples. Default 1000.
        level: coverage of the interval, in (0, 1). Default 0.95.
        seed: same seed, same interval.
        method: "percentile" or "bca", see `dart_lab.studies.bootstrap`.

    Returns:
        One row a column of `values`, with columns `mean`, `low`, `high`, `n` (rows) and `images`.

    Raises:
        DartLabError: no rows, a value that is not finite, lengths that differ, n_boot < 1 or level out of range.

    >>> bootstrap_by_image([1.0, 1.0, 1.0])[["mean", "low", "high", "images"]].values.tolist()
    [[1.0, 1.0, 1.0, 3.0]]
    """
    names = list(values.columns) if isinstance(values, pd.DataFrame) else None
    rows = np.asarray(values, dtype=np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    check_rows(rows)
    counted = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
    table = bootstrap_sums(counted, image_ids, _means, n_boot=n_boot, level=level, seed=seed, method=method)
    return table.rename(columns={"value": "mean"}).set_axis(names if names is not None else table.index)


def _means(sums: Floats) -> Floats:
    """Sums of columns, the last of which counts the rows → means of the others."""
    return np.asarray(sums[..., :-1] / sums[..., -1:])


def jackknife(whole: ArrayLike, without_one: ArrayLike, *, level: float = 0.95) -> pd.DataFrame:
    """Normal interval of smooth statistics from their values with each image left out once.

    For statistics of a mean map, such as a correlation of two maps: resampling with replacement would add the
    sampling noise a second time and shrink every correlation, leaving one out does not.

    Args:
        whole: `(columns,)` or a number, the statistics over all images.
        without_one: `(images, columns)` or `(images,)`, the same with one image left out.
        level: coverage, in (0, 1). Default 0.95.

    Returns:
        One row a statistic, with columns `value`, `low`, `high`.

    Raises:
        DartLabError: fewer than two images, or shapes that do not match.

    >>> jackknife(2.0, [2.5, 2.0, 1.5]).round(3).values.tolist()
    [[2.0, 0.868, 3.132]]
    """
    check_level(level)
    value = np.atleast_1d(np.asarray(whole, dtype=np.float64))
    rest = np.asarray(without_one, dtype=np.float64).reshape(-1, len(value))
    images = len(rest)
    if images < 2 or np.asarray(without_one).size != rest.size:
        raise DartLabError(f"got {np.shape(without_one)} values for {len(value)} statistics; give two images at least")
    error = np.sqrt((images - 1) / images * ((rest - rest.mean(axis=0)) ** 2).sum(axis=0))
    reach = NormalDist().inv_cdf((1 + level) / 2) * error
    return pd.DataFrame({"value": value, "low": value - reach, "high": value + reach})


def gini(shares: ArrayLike) -> Floats:
    """Gini coefficient over the last axis: 0 where all are equal, 1 − 1/n where one has everything.

    Args:
        shares: `(…, n)` numbers ≥ 0, not all zero.

    >>> gini([[1, 1, 1, 1], [0, 0, 0, 1]]).tolist()
    [0.0, 0.75]
    """
    x = np.sort(_check_shares(shares), axis=-1)
    n = x.shape[-1]
    rank = 2 * np.arange(1, n + 1) - n - 1
    return np.asarray((x * rank).sum(axis=-1) / (n * x.sum(axis=-1)))


def kl_from_uniform(shares: ArrayLike) -> Floats:
    """Kullback-Leibler divergence KL(shares ‖ uniform) in nats over the last axis: 0 … log n.

    Args:
        shares: `(…, n)` numbers ≥ 0, not all zero; they are scaled to sum to 1.

    >>> kl_from_uniform([[1, 1], [0, 1]]).round(4).tolist()
    [0.0, 0.6931]
    """
    x = _check_shares(shares)
    p = x / x.sum(axis=-1, keepdims=True)
    return np.asarray(np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0) * x.shape[-1]), 0.0).sum(axis=-1))


def correlation(a: ArrayLike, b: ArrayLike) -> Floats:
    """Pearson correlation over the last axis; 0 where one side is constant.

    >>> correlation([1.0, 2.0, 3.0], [[2.0, 4.0, 6.0], [5.0, 5.0, 5.0]]).round(6).tolist()
    [1.0, 0.0]
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    x, y = x - x.mean(axis=-1, keepdims=True), y - y.mean(axis=-1, keepdims=True)
    scale = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    tiny = x.shape[-1] * np.finfo(np.float64).eps
    return np.asarray(np.where(scale > tiny, (x * y).sum(axis=-1) / np.where(scale > tiny, scale, 1.0), 0.0))


def _check_shares(shares: ArrayLike) -> Floats:
    x = np.asarray(shares, dtype=np.float64)
    if not np.isfinite(x).all() or (x < 0).any() or (x.sum(axis=-1) <= 0).any():
        raise DartLabError("shares must be finite, at least 0 and not all 0")
    return x
