"""Two conditions on the same samples: paired differences, tests, agreement and flips."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.studies.bootstrap import Floats, Method, bootstrap_sums, check_rows, sums_by_image
from dart_lab.studies.scores import CONDITION, RUN, require

_CHUNK = 1 << 24  # signs held at once


def permutation_test(
    differences: ArrayLike, image_ids: ArrayLike | None = None, *, n_perm: int = 9999, seed: int = 0
) -> float:
    """Two-sided p-value of a paired difference: signs are flipped picture by picture.

    p = (1 + permutations at least as far from 0) / (1 + n_perm), which is never 0 (Phipson and Smyth 2010).

    Args:
        differences: `(rows,)` score of one condition minus the other's on the same sample.
        image_ids: `(rows,)`, which picture a row belongs to; rows of a picture flip together.
        n_perm: permutations. Default 9999.
        seed: same seed, same p.

    Raises:
        DartLabError: no rows, a difference that is not finite, or n_perm < 1.

    >>> permutation_test([0.0, 0.0, 0.0])
    1.0
    """
    rows = np.asarray(differences, dtype=np.float64).reshape(-1, 1)
    check_rows(rows)
    if n_perm < 1:
        raise DartLabError(f"n_perm={n_perm}: at least one permutation is needed; 9999 is usual")
    sums = sums_by_image(rows, image_ids)[:, 0]
    sums = sums[sums != 0]
    if not len(sums):
        return 1.0
    seen, rng, at_least = abs(sums.sum()), np.random.default_rng(seed), 0
    step = max(1, _CHUNK // len(sums))
    rounding = len(sums) * np.finfo(np.float64).eps * np.abs(sums).sum()
    for start in range(0, n_perm, step):
        signs = rng.integers(0, 2, size=(min(step, n_perm - start), len(sums)), dtype=np.int8)
        at_least += int((np.abs((2.0 * signs - 1) @ sums) >= seen - rounding).sum())
    return (1 + at_least) / (1 + n_perm)


def holm(p_values: ArrayLike) -> Floats:
    """Holm's step-down correction: adjusted p-values that control the family-wise error rate.

    >>> holm([0.01, 0.04, 0.03]).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise DartLabError("p-values are a list of numbers from 0 to 1")
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    out = np.empty_like(p)
    out[order] = stepped
    return out


def paired(
    records: pd.DataFrame, *, by: str = CONDITION, sample: str = "sample", value: str = "correct"
) -> pd.DataFrame:
    """One row a sample, one column a condition; only samples that every condition has, so that all are comparable.

    Raises:
        DartLabError: a missing column, a sample twice in one condition, or no sample in common.

    >>> records = pd.DataFrame({"condition": ["a", "b"], "sample": ["1", "1"], "correct": [1.0, 0.0]})
    >>> paired(records).values.tolist()
    [[1.0, 0.0]]
    """
    require(records, (by, sample, value))
    twice = records.duplicated([by, sample])
    if twice.any():
        first = records[twice].iloc[0]
        runs = [name for name in RUN if name in records.columns and records[name].nunique() > 1]
        todo = f"take one {' and one '.join(runs)} at a time" if runs else "take each answer once"
        raise DartLabError(f"sample {first[sample]!r} stands twice in condition {first[by]!r}; {todo}")
    order = records[by].drop_duplicates()
    wide = records.pivot(index=sample, columns=by, values=value).reindex(columns=order).dropna()
    if not len(wide):
        raise DartLabError("no sample was answered under every condition, so that nothing can be paired")
    return wide.loc[[name for name in records[sample].drop_duplicates() if name in wide.index]]


def differences(
    records: pd.DataFrame,
    baseline: str,
    *,
    by: str = CONDITION,
    sample: str = "sample",
    value: str = "correct",
    n_boot: int = 1000,
    n_perm: int = 9999,
    level: float = 0.95,
    seed: int = 0,
    method: Method = "percentile",
) -> pd.DataFrame:
    """Every condition against one, on the same samples: mean difference, interval, permutation test, Holm.

    Args:
        records: one row an answer, with `image_id`, `sample`, the condition and the value.
        baseline: the condition that the others are compared with.
        by: the column of conditions.
        sample: the column that names samples.
        value: what is compared. Default "correct".
        n_boot: resamples of pictures. Default 1000.
        n_perm: permutations. Default 9999.
        level: coverage. Default 0.95.
        seed: same seed, same numbers.
        method: "percentile" or "bca".

    Returns:
        One row a condition other than the baseline: the condition, `value` (its mean minus the baseline's), `low`,
        `high`, `n`, `images`, `p` and `p_holm` (over the rows of this table).

    Raises:
        DartLabError: an unknown baseline, or as `paired`.

    >>> records = pd.DataFrame({"condition": ["a", "b"] * 2, "sample": [1, 1, 2, 2], "correct": [1, 0, 1, 0],
    ...                         "image_id": [1, 1, 2, 2]})
    >>> differences(records, "a")[["condition", "value"]].values.tolist()
    [['b', -1.0]]
    """
    require(records, ("image_id",))
    wide = paired(records, by=by, sample=sample, value=value)
    images = records.drop_duplicates(sample).set_index(sample)["image_id"].loc[wide.index].to_numpy()
    rows = []
    for condition in _others(wide, baseline):
        gap = (wide[condition] - wide[baseline]).to_numpy(dtype=np.float64)
        counted = np.column_stack([gap, np.ones(len(gap))])
        table = bootstrap_sums(counted, images, _mean, n_boot=n_boot, level=level, seed=seed, method=method)
        table.insert(0, by, [condition])
        table["p"] = permutation_test(gap, images, n_perm=n_perm, seed=seed)
        rows.append(table)
    if not rows:
        raise DartLabError(f"there is no condition beside {baseline!r} to compare with it")
    out = pd.concat(rows, ignore_index=True)
    out["p_holm"] = holm(out["p"])
    return out


def agreement(records: pd.DataFrame, baseline: str, *, by: str = CONDITION, sample: str = "sample") -> pd.DataFrame:
    """How often each condition gives the baseline's very answer, and which way right and wrong answers flip.

    Returns:
        One row a condition: `agreement` (share of equal predictions), `gained` (wrong → right), `lost` (right →
        wrong), `n`.

    Raises:
        DartLabError: as `differences`.

    >>> records = pd.DataFrame({"condition": ["a", "b"], "sample": [1, 1], "correct": [1, 0], "prediction": ["x", "y"]})
    >>> agreement(records, "a").values.tolist()
    [['b', 0.0, 0, 1, 1]]
    """
    right = paired(records, by=by, sample=sample)
    said = paired(records, by=by, sample=sample, value="prediction").loc[right.index]
    rows = [
        {
            by: condition,
            "agreement": float((said[condition] == said[baseline]).mean()),
            "gained": int((right[condition] > right[baseline]).sum()),
            "lost": int((right[condition] < right[baseline]).sum()),
            "n": len(right),
        }
        for condition in _others(right, baseline)
    ]
    return pd.DataFrame(rows)


def flips(records: pd.DataFrame, baseline: str, *, by: str = CONDITION, sample: str = "sample") -> pd.DataFrame:
    """The samples whose score changed: one row a condition and sample, with the score before and after.

    >>> records = pd.DataFrame({"condition": ["a", "b"], "sample": [1, 1], "correct": [1, 0]})
    >>> flips(records, "a").values.tolist()
    [['b', 1, 1, 0]]
    """
    wide = paired(records, by=by, sample=sample)
    parts = []
    for condition in _others(wide, baseline):
        changed = wide[wide[condition] != wide[baseline]]
        parts.append(
            pd.DataFrame(
                {
                    by: condition,
                    sample: changed.index,
                    "before": changed[baseline].to_numpy(),
                    "after": changed[condition].to_numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[by, sample, "before", "after"])


def _others(wide: pd.DataFrame, baseline: str) -> list[str]:
    """The conditions beside the baseline. Raises `DartLabError` if it is not among them."""
    if baseline not in wide.columns:
        raise DartLabError(f"no condition {baseline!r}. {did_you_mean(baseline, map(str, wide.columns))}")
    return [name for name in wide.columns if name != baseline]


def _mean(sums: Floats) -> Floats:
    return np.asarray(sums[..., :1] / sums[..., 1:])
