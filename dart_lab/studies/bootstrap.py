"""Bootstrap over pictures for any statistic that is a function of sums over rows."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from dart_lab.errors import DartLabError, did_you_mean

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
Method = Literal["percentile", "bca"]
METHODS: tuple[Method, ...] = ("percentile", "bca")

_CHUNK = 1 << 24  # numbers held at once while resampling


def bootstrap_sums(
    rows: ArrayLike,
    image_ids: ArrayLike | None,
    statistic: Statistic,
    *,
    n_boot: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    method: Method = "percentile",
) -> pd.DataFrame:
    """Statistics of column sums with intervals; whole pictures are resampled, not rows.

    Accuracy, F1, a share or a paired difference are all functions of sums over rows, so that a resample costs one
    product of weights and per-picture sums.

    Args:
        rows: `(rows, columns)` finite numbers, one row a sample.
        image_ids: `(rows,)`, which picture a row belongs to; None: every row its own.
        statistic: sums `(…, columns)` → values `(…, statistics)`.
        n_boot: resamples. Default 1000.
        level: coverage of the interval, in (0, 1). Default 0.95.
        seed: same seed, same interval.
        method: "percentile", or "bca" (bias-corrected and accelerated; Efron 1987), which follows skewed statistics
            better and needs the statistic without each picture as well.

    Returns:
        One row a statistic, with columns `value`, `low`, `high`, `n` (rows) and `images`.

    Raises:
        DartLabError: no rows, a value that is not finite, lengths that differ, or a parameter out of range.

    >>> share = lambda sums: sums[..., :1] / sums[..., 1:]
    >>> bootstrap_sums([[1, 1], [1, 1], [0, 1]], None, share).round(2)["value"].tolist()
    [0.67]
    """
    check_level(level)
    if n_boot < 1:
        raise DartLabError(f"n_boot={n_boot}: at least one resample is needed; 1000 is usual")
    if method not in METHODS:
        raise DartLabError(f"unknown method {method!r} of the bootstrap. {did_you_mean(method, METHODS)}")
    values = np.asarray(rows, dtype=np.float64)
    check_rows(values)
    sums = sums_by_image(values, image_ids)
    images = len(sums)
    whole = statistic(sums.sum(axis=0))
    draws = _draws(sums, statistic, n_boot, seed)
    tails = np.full((len(whole), 2), [(1 - level) / 2, (1 + level) / 2])
    if method == "bca" and images > 1:
        tails = _bca_tails(whole, draws, statistic(sums.sum(axis=0) - sums), level)
    ends = np.array([_quantiles(draws[:, i], tails[i]) for i in range(len(whole))])
    return pd.DataFrame({"value": whole, "low": ends[:, 0], "high": ends[:, 1], "n": len(values), "images": images})


def _draws(sums: Floats, statistic: Statistic, n_boot: int, seed: int) -> Floats:
    """`(n_boot, statistics)` values of the statistic on resampled pictures."""
    images = len(sums)
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK // images)
    parts = []
    for start in range(0, n_boot, step):
        size = min(step, n_boot - start)
        weights = rng.multinomial(images, np.full(images, 1 / images), size=size).astype(np.float64)
        parts.append(statistic(weights @ sums))
    return np.concatenate(parts)


def _quantiles(draws: Floats, tails: Floats) -> Floats:
    """Quantiles of the draws on which the statistic is defined; NaN if it is on none."""
    defined = draws[~np.isnan(draws)]
    return np.quantile(defined, tails) if len(defined) else np.full(len(tails), np.nan)


def _bca_tails(whole: Floats, draws: Floats, without_one: Floats, level: float) -> Floats:
    """`(statistics, 2)` probabilities at which to cut the draws; the plain ones where a statistic never moves."""
    normal, plain = NormalDist(), np.array([(1 - level) / 2, (1 + level) / 2])
    out = np.tile(plain, (len(whole), 1))
    for i, value in enumerate(whole):
        below = float(np.mean(draws[:, i] < value) + np.mean(draws[:, i] == value) / 2)
        apart = without_one[:, i].mean() - without_one[:, i]
        spread = float((apart**2).sum())
        if not 0 < below < 1 or not spread > 0:
            continue
        bias, acceleration = normal.inv_cdf(below), float((apart**3).sum()) / (6 * spread**1.5)
        for side, tail in enumerate(plain):
            shifted = bias + normal.inv_cdf(tail)
            if 1 - acceleration * shifted > 0:  # beyond the pole the correction means nothing
                out[i, side] = normal.cdf(bias + shifted / (1 - acceleration * shifted))
    return out


def sums_by_image(rows: Floats, image_ids: ArrayLike | None) -> Floats:
    """`(images, columns)` sums over the rows of each picture, in order of appearance."""
    if image_ids is None:
        return rows
    codes, unique = pd.factorize(np.asarray(image_ids))
    if len(codes) != len(rows):
        raise DartLabError(f"{len(rows)} rows but {len(codes)} image ids; give one id a row")
    sums = np.zeros((len(unique), rows.shape[1]))
    np.add.at(sums, codes, rows)
    return sums


def check_rows(rows: Floats) -> None:
    """Raise `DartLabError` unless there is a row and every number is finite."""
    if rows.ndim != 2 or not len(rows):
        raise DartLabError(f"values of shape {rows.shape}: expected (rows, columns) with at least one row")
    if not np.isfinite(rows).all():
        raise DartLabError("a value is NaN or infinite; drop that sample or mend its measurement first")


def check_level(level: float) -> None:
    """Raise `DartLabError` unless a coverage lies between 0 and 1."""
    if not 0 < level < 1:
        raise DartLabError(f"level={level}: the coverage of an interval lies between 0 and 1, for example 0.95")
