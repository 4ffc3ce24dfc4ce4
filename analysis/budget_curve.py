"""`dart-lab figure budget-curve`: how much of the score is left at how many tokens, in every convention of a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dart_lab.displays.curves import Curve, Panel, caption, draw_curves
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.fitting import fit
from dart_lab.studies.bootstrap import Floats, bootstrap_sums
from dart_lab.studies.plan import NONE_KEPT, UNPRUNED

from .sweep import interval, open_bench

KEEP = (384, 288, 192, 128, 64, 32, 16)
METHODS = ("dart", "fastv", "random", "divprune", "pyramiddrop")
SAMPLES = 140
CONVENTIONS = {
    "got": "tokens kept at the end",
    "processed": "layer average, inputs",
    "output": "layer average, outputs",
}


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer every question under every method and budget.

    Args:
        options: `methods` default to five, `keep` to seven budgets, `n` to 140 questions.
        progress: show a progress bar on stderr.
    """
    bench = open_bench(options, n=SAMPLES, keep=KEEP, methods=METHODS)
    o = bench.options
    conditions: dict[str, Pruner | None] = {
        UNPRUNED: None, NONE_KEPT: fit("none-kept", keep=1, depth=bench.depth, layer=o.layer),
    }  # fmt: skip
    for name in o.methods or ():
        for keep in o.keep or ():
            fitted = fit(name, keep=int(keep), depth=bench.depth, layer=o.layer, seed=o.seed)
            conditions[f"{name}@{keep}"] = fitted
    records = bench.answers(conditions, progress)
    return FigureData(records, {**bench.facts("budget-curve"), **measure(records, seed=o.seed)})


def measure(records: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """Retention (score / unpruned score on the same questions) of every condition, with its tokens in each convention.

    The interval resamples pictures for both scores together, so that what a question does to both cancels.

    Args:
        records: with conditions "method@keep", "unpruned" and "none kept".
        seed: of the bootstrap.
        n_boot: resamples. Default 1000.

    Returns:
        `methods`: name → rows of `keep`, `retention`, `got`, `processed`, `output`; `none_kept`: retention; `images`.
    """
    whole = records[records["condition"] == UNPRUNED].set_index("sample")
    if not whole["correct"].sum() > 0:
        raise DartLabError("the unpruned model answers nothing right here, so that no share of its score can be given")
    methods: dict[str, list[dict[str, Any]]] = {}
    none = 0.0
    for condition in records["condition"].unique():
        own = records[records["condition"] == condition].set_index("sample").loc[whole.index]
        pair = own[["correct"]].assign(whole=whole["correct"]).to_numpy()
        table = bootstrap_sums(
            pair, own["image_id"].to_numpy(), share_of_whole, n_boot=n_boot, seed=seed
        )  # fmt: skip
        method, _, keep = condition.partition("@")
        if condition == NONE_KEPT:
            none = float(table.iloc[0]["value"])
        if keep:
            row = {"keep": int(keep), "retention": interval(table.iloc[0])}
            methods.setdefault(method, []).append({**row, **{name: float(own[name].mean()) for name in CONVENTIONS}})
    return {"methods": methods, "none_kept": none, "images": int(records["image_id"].nunique())}


def share_of_whole(sums: Floats) -> Floats:
    """Sums of a condition's and the unpruned score → their ratio; NaN where a resample has no right answer at all."""
    whole = sums[..., 1:]
    return np.asarray(np.divide(sums[..., :1], whole, out=np.full_like(whole, np.nan), where=whole > 0))


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Retention of every method at its budgets."""
    return [
        f"{method}: " + ", ".join(f"{row['keep']} → {100 * row['retention']['value']:.1f} %" for row in rows)
        for method, rows in facts["methods"].items()
    ]


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Any:
    """One panel a convention."""
    panels = [
        Panel(
            words, "visual tokens", "of the unpruned score (%)",
            [
                Curve(method, [row[name] for row in rows], [row["retention"] for row in rows])
                for method, rows in facts["methods"].items()
            ],
            {"unpruned": 1.0, "none kept": facts["none_kept"]},
        )
        for name, words in CONVENTIONS.items()
    ]  # fmt: skip
    rest = (
        "The same runs three times: a budget of one convention is another budget in the next. Layer average: visual "
        "tokens that decoder layers\nprocess (inputs) or hand on (outputs), averaged. Methods with several cuts are "
        "matched by the average of their inputs."
    )
    return draw_curves(panels, title="Score against budget, in three conventions", caption=caption(facts, rest))


FIGURE = FigureSpec(
    name="budget-curve",
    summary="share of the unpruned score against tokens kept, in every convention of a budget",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
)
