"""`dart-lab figure method-table`: every method at several budgets, by family of question, against chance and floors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.displays.method_table import draw_method_table
from dart_lab.pruners.fitting import BUDGETLESS, fit
from dart_lab.pruners.registry import pruner_names
from dart_lab.studies.answering import answer_all
from dart_lab.studies.comparison import differences, holm
from dart_lab.studies.plan import NONE_KEPT, UNPRUNED
from dart_lab.studies.scores import score_table
from dart_lab.tasks.base import Sample
from dart_lab.tasks.coarse import coarse

from .sweep import DATA, interval, open_bench, points, runnable

KEEP = (192, 128, 64)
SAMPLES = 140
BLIND, RANDOM = "blind floor", "random"
COARSE = "coarse picture"  # all tokens, of a picture with as many pixels as `keep` of them show
BLIND_SHIFT = 1_000_003  # seed of the pictures on which the blind floor learns its answers, away from the task's own
OVERALL = "all"
LEVEL = 0.05  # of Holm's correction over the whole table


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer every question under every method and budget.

    Args:
        options: `methods` default to all that are registered, `keep` to 192, 128 and 64, `n` to 140 questions.
        progress: show a progress bar on stderr.

    Raises:
        DartLabError: an unknown method, model or task; fewer than two samples; ratios in place of whole numbers.
    """
    from dart_lab.tasks import load_task

    every = tuple(name for name in pruner_names() if name not in BUDGETLESS)
    bench = open_bench(options, n=SAMPLES, keep=KEEP, methods=every)
    o, task, depth = bench.options, bench.task, bench.depth
    budgets = [int(keep) for keep in o.keep or ()]
    wanted = {
        f"{name}@{keep}": partial(fit, name, keep=keep, depth=depth, layer=o.layer, seed=o.seed)
        for name in dict.fromkeys((RANDOM, *(o.methods or ())))
        for keep in budgets
    }
    found, refused = runnable(bench, wanted)
    none = fit("none-kept", keep=0, depth=depth, layer=o.layer)
    records = [bench.answers({UNPRUNED: None, NONE_KEPT: none, **found}, progress)]
    for keep in budgets:
        small = coarse(task, share=keep / depth.visual)
        records.append(answer_all(bench.vlm, small, {f"{COARSE}@{keep}": None}, batch_size=o.batch_size))
    learnt = load_task(DATA, n=2 * len(task), seed=o.seed + BLIND_SHIFT) if task.name == DATA else task
    table = pd.concat([blind_records(task, learnt), *records], ignore_index=True)
    facts = {**bench.facts("method-table"), "budgets": budgets, "refused": refused, **measure(table, seed=o.seed)}
    return FigureData(table, facts)


def blind_records(samples: Sequence[Sample], learnt: Sequence[Sample]) -> pd.DataFrame:
    """Answers without a picture: for each question the most frequent answer to its words on other pictures.

    A question that did not occur there gets the most frequent answer of its family, then of all questions; of answers
    as frequent, the first in the alphabet. Questions on the sample's own picture never count, so that a task may learn
    from itself.
    """
    everything, own = _Answers(), {_image(sample): _Answers() for sample in samples}
    for sample in learnt:
        everything.add(sample)
        if _image(sample) in own:
            own[_image(sample)].add(sample)
    rows = []
    for sample in samples:
        guess = everything.guess(sample, without=own[_image(sample)])
        rows.append(
            {
                "condition": BLIND, "sample": sample.id, "image_id": _image(sample),
                "family": sample.family, "prediction": guess, "answer": sample.answer,
                "correct": float(guess == sample.answer), "visual": 0, "asked": 0, "got": 0,
                "processed": 0.0, "output": 0.0,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


class _Answers:
    """How often each answer occurs, by question, by family and in all."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Counter[str]] = {}

    def add(self, sample: Sample) -> None:
        for key in self._keys(sample):
            self.counts.setdefault(key, Counter())[sample.answer] += 1

    def guess(self, sample: Sample, *, without: _Answers) -> str:
        """The most frequent answer, counts of `without` taken away; empty if nothing is left."""
        for key in self._keys(sample):
            seen = self.counts.get(key, Counter()) - without.counts.get(key, Counter())
            if seen:
                return min(seen, key=lambda answer: (-seen[answer], answer))
        return ""

    @staticmethod
    def _keys(sample: Sample) -> list[tuple[str, str]]:
        return [("question", sample.question), ("family", sample.family), ("all", "")]


def _image(sample: Sample) -> str:
    return sample.image_id or sample.id


def measure(records: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000, n_perm: int = 1999) -> dict[str, Any]:
    """All numbers of the table from the records of `answer_all`.

    Args:
        records: with conditions named `method@keep`, "unpruned", "none kept" and "blind floor".
        seed: of bootstrap and permutations.
        n_boot: resamples of pictures. Default 1000.
        n_perm: permutations of the paired test. Default 1999.

    Returns:
        `families`, `rows`: one entry a condition, with `method`, `keep`, `accuracy` (family → value, low, high; "all"
        is the mean over questions), `asked`, `got`, `processed`, `output`, and where Random has the same budget
        `minus_random` (value, low, high, p, and p_holm over all rows of the table), `below_random`: the 95 % interval
        lies below 0, and `below_random_holm`: Holm's correction leaves it so (p_holm < 0.05); `above_none`: the
        interval of the difference to "none kept" lies above 0. Random is one draw, by one seed.
    """
    overall = score_table(records, seed=seed, n_boot=n_boot).set_index("condition")
    by_family = score_table(records, by=("condition", "family"), seed=seed, n_boot=n_boot)
    means = records.groupby("condition", sort=False)[["asked", "got", "processed", "output"]].mean()
    rows = []
    for condition in overall.index:
        method, _, keep = condition.partition("@")
        own = by_family[by_family["condition"] == condition]
        accuracy = {OVERALL: interval(overall.loc[condition])}
        accuracy |= {row["family"]: interval(row) for _, row in own.iterrows()}
        rows.append(
            {
                "condition": condition, "method": method, "keep": int(keep) if keep else None, "accuracy": accuracy,
                **{name: float(value) for name, value in means.loc[condition].items()},
            }
        )  # fmt: skip
    found = {row["condition"]: row for row in rows}
    for keep in sorted({row["keep"] for row in rows if row["keep"] is not None}):
        same = [row["condition"] for row in rows if row["keep"] == keep]
        if f"{RANDOM}@{keep}" in same and len(same) > 1:
            gaps = differences(
                records[records["condition"].isin(same)], f"{RANDOM}@{keep}", seed=seed, n_boot=n_boot, n_perm=n_perm
            )
            for _, gap in gaps.iterrows():
                found[gap["condition"]]["minus_random"] = {**interval(gap), "p": float(gap["p"])}
                found[gap["condition"]]["below_random"] = bool(gap["high"] < 0)
    compared = [row for row in rows if "minus_random" in row]
    for row, p in zip(compared, holm([row["minus_random"]["p"] for row in compared]), strict=True):
        row["minus_random"]["p_holm"] = float(p)
        row["below_random_holm"] = row["below_random"] and bool(p < LEVEL)
    if NONE_KEPT in found:
        rest = records[~records["condition"].isin([BLIND])]
        for _, gap in differences(rest, NONE_KEPT, seed=seed, n_boot=n_boot, n_perm=1).iterrows():
            found[gap["condition"]]["above_none"] = bool(gap["low"] > 0)
    families = list(dict.fromkeys(records["family"]))
    return {"families": families, "images": int(records["image_id"].nunique()), "rows": rows}


def lines(facts: Mapping[str, Any]) -> list[str]:
    """The table in Markdown, one row a condition, percent."""
    families = [OVERALL, *facts["families"]]
    head = ["method", "keep", "got", "layer mean", "output mean", *families, "minus random", ""]
    out = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in facts["rows"]:
        cells = [row["method"], "" if row["keep"] is None else str(row["keep"]), f"{row['got']:.0f}"]
        cells += [f"{row['processed']:.0f}", f"{row['output']:.0f}"]
        cells += [_percent(row["accuracy"].get(family)) for family in families]
        gap = row.get("minus_random")
        cells.append("" if gap is None else points(gap))
        notes = []
        if row.get("below_random"):
            notes.append("below Random" if row["below_random_holm"] else "below Random (not after Holm)")
        notes += ["not above none kept"] if row.get("above_none") is False else []
        out.append("| " + " | ".join([*cells, "; ".join(notes)]) + " |")
    out += [f"{label}: {why}" for label, why in facts["refused"].items()]
    below = [row["condition"] for row in facts["rows"] if row.get("below_random")]
    sure = [row["condition"] for row in facts["rows"] if row.get("below_random_holm")]
    compared = sum("minus_random" in row for row in facts["rows"])
    return [
        *out,
        f"below Random (95 % interval of the paired difference): {', '.join(below) or 'none'}",
        f"of these after Holm's correction over {compared} comparisons: {', '.join(sure) or 'none'}",
    ]


def _percent(stat: Mapping[str, float] | None) -> str:
    return "" if stat is None else f"{100 * stat['value']:.0f}"


def _draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Any:
    return draw_method_table(facts)


FIGURE = FigureSpec(
    name="method-table",
    summary="every method at several budgets: accuracy by family, floors, difference to Random",
    compute=compute,
    draw=_draw,
    lines=lines,
    trace=False,
)
