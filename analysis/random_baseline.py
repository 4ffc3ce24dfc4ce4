"""`dart-lab figure random-baseline`: every method against Random and Uniform grid, paired, families counted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.curves import Dots, caption, dots_height, draw_dots
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.errors import DartLabError
from dart_lab.pruners.fitting import BUDGETLESS, fit
from dart_lab.pruners.registry import pruner_names
from dart_lab.studies.comparison import differences, holm

from .sweep import open_bench, runnable

KEEP = (64,)
SAMPLES = 280
BASELINES = ("random", "uniform-grid")
OVERALL = "all"


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer every question under every method.

    Args:
        options: `methods` default to all that run on the model, `keep` to 64, `n` to 280 questions.
        progress: show a progress bar on stderr.
    """
    every = tuple(name for name in pruner_names() if name not in BUDGETLESS)
    bench = open_bench(options, n=SAMPLES, keep=KEEP, methods=every)
    o = bench.options
    if len(o.keep or ()) != 1:
        raise DartLabError(f"random-baseline is about one budget, got {list(o.keep or ())}; give --keep 64")
    keep = int((o.keep or KEEP)[0])
    wanted = {
        name: partial(fit, name, keep=keep, depth=bench.depth, layer=o.layer, seed=o.seed)
        for name in dict.fromkeys([*BASELINES, *(o.methods or ())])
    }
    found, refused = runnable(bench, wanted)
    records = bench.answers(found, progress)
    facts = {**bench.facts("random-baseline"), "keep": keep, "refused": refused, **measure(records, seed=o.seed)}
    return FigureData(records, facts)


def measure(records: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000, n_perm: int = 1999) -> dict[str, Any]:
    """Paired differences to both baselines, overall and by family, and how many of them lie below zero.

    Args:
        records: one condition a method, "random" and "uniform-grid" among them.
        seed: of bootstrap and permutations.
        n_boot: resamples of pictures. Default 1000.
        n_perm: permutations. Default 1999.

    Returns:
        `gaps`: baseline → method → family → value, low, high, p, p_holm (over the methods of a family); `counts`:
        baseline → method → `below` and `above`: families, of `of`, whose interval lies below or above zero.
    """
    families = list(dict.fromkeys(records["family"]))
    gaps: dict[str, dict[str, dict[str, Any]]] = {}
    for baseline in BASELINES:
        own = gaps.setdefault(baseline, {})
        for family in [OVERALL, *families]:
            part = records if family == OVERALL else records[records["family"] == family]
            table = differences(part, baseline, seed=seed, n_boot=n_boot, n_perm=n_perm)
            table["p_holm"] = holm(table["p"])
            for _, row in table.iterrows():
                own.setdefault(row["condition"], {})[family] = {
                    name: float(row[name]) for name in ("value", "low", "high", "p", "p_holm")
                }
    counts = {
        baseline: {
            method: {
                "below": sum(by[family]["high"] < 0 for family in families),
                "above": sum(by[family]["low"] > 0 for family in families),
                "of": len(families),
            }
            for method, by in own.items()
        }
        for baseline, own in gaps.items()
    }
    images = int(records["image_id"].nunique())
    return {"families": families, "gaps": gaps, "counts": counts, "images": images}


def lines(facts: Mapping[str, Any]) -> list[str]:
    """In how many families each method lies below and above each baseline."""
    out = []
    for method, count in facts["counts"]["random"].items():
        grid = facts["counts"]["uniform-grid"].get(method)
        words = f"{method}: below Random in {count['below']} of {count['of']} families, above in {count['above']}"
        if grid is not None:
            words += f"; below the uniform grid in {grid['below']}, above in {grid['above']}"
        out.append(words)
    return out + [f"{name}: {why}" for name, why in facts["refused"].items()]


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Difference to each baseline over all questions, and the count of families on either side."""
    gaps = facts["gaps"]["random"]
    order = sorted(gaps, key=lambda method: -gaps[method][OVERALL]["value"])
    panels = [
        Dots(
            f"minus {baseline}", "points", {m: [facts["gaps"][baseline].get(m, {}).get(OVERALL)] for m in order},
            (baseline,), zero=0.0,
        )
        for baseline in BASELINES
    ]  # fmt: skip
    width, height = 8.4, 1.15 + dots_height(panels[0]) + 1.1
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        1, 3, left=1.35 / width, right=0.98, top=1 - 1.0 / height, bottom=1.1 / height, wspace=0.12,
        width_ratios=[1, 1, 0.75],
    )  # fmt: skip
    for j, panel in enumerate(panels):
        draw_dots(figure.add_subplot(grid[0, j]), panel, names=j == 0)
    axes = figure.add_subplot(grid[0, 2])
    for i, method in enumerate(order):
        count = facts["counts"]["random"][method]
        axes.text(0.02, i, f"{count['below']} below, {count['above']} above of {count['of']}", va="center", fontsize=8)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_axis_off()
    axes.set_title("families against Random")
    title = f"Do methods beat chance?  keep {facts['keep']} of {facts['visual']}"
    figure.suptitle(title, x=0.02, ha="left", y=1 - 0.15 / height)
    rest = (
        "Paired differences on the same questions; orange triangle: the interval lies below zero. A family counts "
        "where its own interval does, uncorrected for their number.\nMethods in front of the language model keep their "
        "tokens from layer 0 on and spend less."
    )
    figure.text(0.02, 0.1 / height, caption(facts, rest), fontsize=7.5, va="bottom")
    return figure


FIGURE = FigureSpec(
    name="random-baseline",
    summary="every method against Random and Uniform grid, paired, with families counted",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
)
