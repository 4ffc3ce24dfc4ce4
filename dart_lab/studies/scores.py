"""Scores of conditions from records: data frame in, data frame out, every number with its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.studies.answers import yes_or_no
from dart_lab.studies.bootstrap import Floats, Method, bootstrap_sums

CONDITION = "condition"
RUN = ("model", "task")  # columns that tell runs of a study apart


@dataclass(frozen=True)
class Metric:
    """A score as a function of sums over rows.

    Attributes:
        columns: what a row contributes: records → `(rows, columns)`.
        statistic: sums `(…, columns)` → values `(…, names)`.
        names: what the values are.
        needs: columns that the records must have.
    """

    columns: Callable[[pd.DataFrame], Floats]
    statistic: Callable[[Floats], Floats]
    names: tuple[str, ...]
    needs: tuple[str, ...]


def score_table(
    records: pd.DataFrame,
    metric: str = "accuracy",
    *,
    by: Sequence[str] = (CONDITION,),
    n_boot: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    method: Method = "percentile",
) -> pd.DataFrame:
    """One row a group and score, with an interval over pictures.

    Args:
        records: one row an answer; `image_id`, the columns of `by`, and what the metric needs: `accuracy` `correct`
            (0 to 1, so soft accuracies, IoU and ANLS fit); `f1` (yes is the positive class) and `mme`, where both
            questions on a picture must be right for acc+, `prediction` and `answer`.
        metric: "accuracy", "f1" (f1, precision, recall, yes share, accuracy) or "mme" (acc, acc+, score in points of
            200: 100 × (acc + acc+)).
        by: the groups, in order of appearance.
        n_boot: resamples. Default 1000.
        level: coverage. Default 0.95.
        seed: same seed, same intervals.
        method: "percentile" or "bca".

    Returns:
        Columns of `by`, `score`, `value`, `low`, `high`, `n`, `images`. A score that is not defined (F1 without any
        yes) is NaN.

    Raises:
        DartLabError: unknown metric, missing column, no rows.

    >>> answers = pd.DataFrame({"condition": "all", "correct": [1.0, 0.0], "image_id": ["a", "b"]})
    >>> score_table(answers)[["score", "value", "n"]].values.tolist()
    [['accuracy', 0.5, 2]]
    """
    if metric not in METRICS:
        raise DartLabError(f"unknown metric {metric!r}. {did_you_mean(metric, sorted(METRICS))}")
    rule = METRICS[metric]
    require(records, (*by, "image_id", *rule.needs))
    parts = []
    for key, group in groups(records, by):
        table = bootstrap_sums(
            rule.columns(group),
            group["image_id"].to_numpy(),
            rule.statistic,
            n_boot=n_boot,
            level=level,
            seed=seed,
            method=method,
        )
        table.insert(0, "score", rule.names)
        for place, (name, value) in enumerate(zip(by, key, strict=True)):
            table.insert(place, name, value)
        parts.append(table)
    return pd.concat(parts, ignore_index=True)


def complete(
    records: pd.DataFrame, *, by: str = CONDITION, sample: str = "sample", value: str = "correct"
) -> pd.DataFrame:
    """The records of samples that every condition answered, so that all are scored on the same questions.

    A failed record of a study has no `correct`; its sample goes, under every condition. Models and tasks, where the
    records have those columns, are looked at each by itself.

    Raises:
        DartLabError: a missing column, or no sample is left.

    >>> records = pd.DataFrame({"condition": list("abab"), "sample": [1, 1, 2, 2], "correct": [1.0, None, 1.0, 0.0]})
    >>> complete(records)["sample"].tolist()
    [2, 2]
    """
    require(records, (by, sample, value))
    apart = [name for name in RUN if name in records.columns]
    key = [records[name] for name in [*apart, sample]]
    answering = records[by].where(records[value].notna()).groupby(key, dropna=False).transform("nunique")
    asked = records[by].groupby(key[:-1], dropna=False).transform("nunique") if apart else records[by].nunique()
    out = records[answering == asked]
    if not len(out):
        raise DartLabError("no sample was answered under every condition; look at the column 'failure' of the records")
    return out


def pope_score(table: pd.DataFrame, *, by: Sequence[str] = (CONDITION,), category: str = "family") -> pd.DataFrame:
    """POPE as papers print it: the plain mean of the F1 of its categories, from `score_table(…, "f1", by=…)`.

    >>> scores = pd.DataFrame({"condition": "all", "family": list("abc"), "score": "f1", "value": [0.8, 0.9, 1.0]})
    >>> pope_score(scores)["value"].round(6).tolist()
    [0.9]
    """
    require(table, (*by, category, "score", "value"))
    return table[table["score"] == "f1"].groupby(list(by), sort=False, observed=True)["value"].mean().reset_index()


def retention(scores: pd.DataFrame, baseline: str, *, by: str = CONDITION, task: str = "task") -> pd.DataFrame:
    """Score of every condition as a share of the unpruned one's, for each task, and the papers' Avg %.

    Avg % = 100 × mean over tasks of score / unpruned score, unweighted; tasks that a condition lacks are left out of
    its mean.

    Args:
        scores: one row a condition and task, with `value`.
        baseline: the condition that is unpruned.
        by: the column of conditions.
        task: the column of tasks.

    Returns:
        One row a condition: a column a task (ratio), and `avg_pct`.

    Raises:
        DartLabError: the baseline is missing, or its score is 0 for some task.

    >>> rows = [("all", "a", 50.0), ("all", "b", 80.0), ("dart", "a", 45.0), ("dart", "b", 80.0)]
    >>> retention(pd.DataFrame(rows, columns=["condition", "task", "value"]), "all")["avg_pct"].tolist()
    [100.0, 95.0]
    """
    require(scores, (by, task, "value"))
    wide = scores.pivot(index=by, columns=task, values="value")
    if baseline not in wide.index:
        raise DartLabError(f"no condition {baseline!r}. {did_you_mean(baseline, map(str, wide.index))}")
    whole = wide.loc[baseline]
    nothing = [name for name, score in whole.items() if not score > 0]
    if nothing:
        bad = nothing[0]
        raise DartLabError(f"{baseline!r} scores nothing on task {bad!r}, so that no share of it can be given")
    ratio = wide / whole
    ratio["avg_pct"] = 100 * ratio.mean(axis=1)
    ratio.columns.name = None
    return ratio.reindex(scores[by].drop_duplicates()).reset_index()


def groups(records: pd.DataFrame, by: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Key and rows of each group, in order of appearance."""
    if not len(records):
        raise DartLabError("there are no records to score")
    if not by:
        yield (), records
        return
    yield from records.groupby(list(by), sort=False, observed=True)


def require(table: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise `DartLabError` for the first column that a table lacks."""
    for name in columns:
        if name not in table.columns:
            raise DartLabError(f"the records have no column {name!r}. {did_you_mean(name, map(str, table.columns))}")


def _correct(records: pd.DataFrame) -> Floats:
    missing = int(records["correct"].isna().sum())
    if missing:
        raise DartLabError(
            f"{missing} of {len(records)} records have no 'correct' (failures); take complete(records), the samples "
            "that every condition answered"
        )
    return np.column_stack([records["correct"].to_numpy(dtype=np.float64), np.ones(len(records))])


def _ratio(sums: Floats) -> Floats:
    return np.asarray(sums[..., :1] / sums[..., 1:])


def _yes_no(records: pd.DataFrame) -> Floats:
    """Columns: true positives, false positives, false negatives, true negatives."""
    said = (records["prediction"].astype(str).map(yes_or_no) == "yes").to_numpy()
    is_yes = (records["answer"].astype(str).map(yes_or_no) == "yes").to_numpy()
    return np.column_stack([said & is_yes, said & ~is_yes, ~said & is_yes, ~said & ~is_yes]).astype(np.float64)


def _f1(sums: Floats) -> Floats:
    hit, false, missed, rest = (sums[..., i] for i in range(4))
    with np.errstate(invalid="ignore"):
        return np.stack(
            [
                2 * hit / (2 * hit + false + missed),
                hit / (hit + false),
                hit / (hit + missed),
                (hit + false) / (hit + false + missed + rest),
                (hit + rest) / (hit + false + missed + rest),
            ],
            axis=-1,
        )


def _mme(records: pd.DataFrame) -> Floats:
    """Columns: right answers, answers, pictures with all right, pictures; the last two counted on one row each."""
    right = (
        records["prediction"].astype(str).map(yes_or_no) == records["answer"].astype(str).map(yes_or_no)
    ).to_numpy()
    images = records["image_id"].to_numpy()
    all_right = pd.Series(right).groupby(images).transform("min").to_numpy()
    first = ~pd.Series(images).duplicated().to_numpy()
    return np.column_stack([right, np.ones(len(right)), all_right & first, first]).astype(np.float64)


def _mme_scores(sums: Floats) -> Floats:
    each, both = sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]
    return np.stack([each, both, 100 * (each + both)], axis=-1)


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(_correct, _ratio, ("accuracy",), ("correct",)),
    "f1": Metric(_yes_no, _f1, ("f1", "precision", "recall", "yes_share", "accuracy"), ("prediction", "answer")),
    "mme": Metric(_mme, _mme_scores, ("acc", "acc_plus", "mme"), ("prediction", "answer")),
}
