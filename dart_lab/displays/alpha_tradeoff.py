"""The picture of the α trade-off: score over α for each task, what choosing α is worth, and the published sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dart_lab.displays.style import CHANCE, PALETTE
from dart_lab.errors import DartLabError

_PANEL, _HEIGHT = 2.35, 2.5  # inches
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.6, 0.2, 1.0, 1.25
_BAND = 0.13
_MAP = "viridis"
_RULES = {"fixed": "one α", "per_task": "one α a task", "predicted": "by question", "oracle": "oracle a task"}


def draw_alpha_tradeoff(facts: Mapping[str, Any]) -> Figure:
    """Draw the facts of `dart_lab.analysis.alpha_tradeoff`.

    Raises:
        DartLabError: a fact is missing.
    """
    try:
        return _draw(facts)
    except KeyError as error:
        raise DartLabError(f"the facts of alpha-tradeoff lack {error}; make the figure again") from error


def _draw(facts: Mapping[str, Any]) -> Figure:
    tasks, budgets, alphas = facts["tasks"], facts["budgets"], facts["alphas"]
    columns = max(len(tasks), 3)
    width, height = _LEFT + _PANEL * columns + _RIGHT, _TOP + 2 * _HEIGHT + _BOTTOM
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        2, columns, left=_LEFT / width, right=1 - _RIGHT / width, top=1 - _TOP / height, bottom=_BOTTOM / height,
        hspace=0.55, wspace=0.28,
    )  # fmt: skip
    shades = [mpl.colormaps[_MAP](x) for x in np.linspace(0.0, 0.85, len(budgets))]
    first: Axes | None = None
    for j, task in enumerate(tasks):
        axes = figure.add_subplot(grid[0, j])
        first = first or axes
        _curves(axes, facts, task, alphas, budgets, shades)
        if j == 0:
            axes.set_ylabel("right answers (%)")
    if first is not None:
        handles, labels = first.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper right", ncols=len(budgets) + 2, frameon=False, fontsize=8,
            bbox_to_anchor=(1 - _RIGHT / width, 1 - 0.34 / height), columnspacing=1.0, handlelength=1.6,
        )  # fmt: skip
    below = figure.add_gridspec(
        1, 3, left=0.95 / width, right=1 - _RIGHT / width, top=(_BOTTOM + _HEIGHT * 0.86) / height,
        bottom=_BOTTOM / height, wspace=0.42,
    )  # fmt: skip
    _best(figure.add_subplot(below[0, 0]), facts, tasks, budgets, shades)
    _worth(figure.add_subplot(below[0, 1]), facts, budgets, shades)
    _published(figure.add_subplot(below[0, 2]), facts, alphas)
    figure.suptitle(
        "The α trade-off: importance (α = 1) against uniqueness (α = 0)", x=0.02, ha="left", y=1 - 0.12 / height
    )
    published = facts["published"]
    figure.text(
        0.02, 0.1 / height,
        f"{facts['model']} on {facts['data']}: {facts['n']} questions on {facts['images']} pictures, cut before "
        f"decoder layer {facts['layer']}. Bands and bars: 95 %, bootstrap over pictures.\nBest α: bar = where the "
        "best α lies when pictures are resampled. Choosing α: learnt on one half of the pictures, judged on the rest.\n"
        f"Published: {published['source']}, {published['keep']} of 576 tokens, each score as a share of its best; "
        "another model, other questions.",
        fontsize=7.5, va="bottom",
    )  # fmt: skip
    return figure


def _curves(
    axes: Axes,
    facts: Mapping[str, Any],
    task: str,
    alphas: Sequence[float],
    budgets: Sequence[int],
    shades: Sequence[Any],
) -> None:
    for keep, shade in zip(budgets, shades, strict=True):
        curve = next(c for c in facts["curves"] if c["task"] == task and c["keep"] == keep)
        value, low, high = (np.array([100 * s[end] for s in curve["scores"]]) for end in ("value", "low", "high"))
        axes.fill_between(alphas, low, high, color=shade, alpha=_BAND, linewidth=0)
        axes.plot(alphas, value, color=shade, marker="o", markersize=3, linewidth=1.3, label=f"keep {keep}")
    floors = facts["floors"].get(task, {})
    for name, style in (("unpruned", "-"), ("none kept", ":")):
        if name in floors:
            axes.axhline(100 * floors[name]["value"], color=CHANCE, linestyle=style, linewidth=1.2, label=name)
    axes.set_title(task)
    axes.set_xlabel("α")
    axes.set_xlim(-0.03, 1.03)


def _best(
    axes: Axes, facts: Mapping[str, Any], tasks: Sequence[str], budgets: Sequence[int], shades: Sequence[Any]
) -> None:
    """The best α of each task and budget with its interval."""
    step = 0.8 / len(budgets)
    for i, task in enumerate(tasks):
        for j, (keep, shade) in enumerate(zip(budgets, shades, strict=True)):
            best = next(c for c in facts["curves"] if c["task"] == task and c["keep"] == keep)["best"]
            at = i + (j - (len(budgets) - 1) / 2) * step
            axes.plot([best["low"], best["high"]], [at, at], color=shade, linewidth=1.6)
            axes.plot(best["value"], at, marker="o", color=shade, markersize=4)
    axes.set_yticks(range(len(tasks)), tasks)
    axes.invert_yaxis()
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("best α")
    axes.set_title("Which α is best")


def _worth(axes: Axes, facts: Mapping[str, Any], budgets: Sequence[int], shades: Sequence[Any]) -> None:
    """What every rule for choosing α gains over one α for all."""
    step = 0.7 / len(budgets)
    rules = {rule: name for rule, name in _RULES.items() if rule != "fixed"}
    axes.axvline(0, color=CHANCE, linewidth=1)
    for j, (row, shade) in enumerate(zip(facts["adaptive"], shades, strict=True)):
        for i, rule in enumerate(rules):
            gain, at = row[rule]["gain"], i + (j - (len(budgets) - 1) / 2) * step
            axes.plot([100 * gain["low"], 100 * gain["high"]], [at, at], color=shade, linewidth=1.6)
            axes.plot(100 * gain["value"], at, marker="o", color=shade, markersize=4)
    axes.set_yticks(range(len(rules)), list(rules.values()))
    axes.invert_yaxis()
    axes.set_xlabel("points more than with one α for all")
    axes.set_title("What choosing α is worth")


def _published(axes: Axes, facts: Mapping[str, Any], alphas: Sequence[float]) -> None:
    for (name, scores), colour, marker in zip(facts["published"]["scores"].items(), PALETTE, "osv^D", strict=False):
        if len(scores) == len(alphas):
            axes.plot(
                alphas, 100 * np.array(scores) / max(scores), color=colour, marker=marker, markersize=3, label=name
            )
    axes.set_title("Published, another model")
    axes.set_xlabel("α")
    axes.set_ylabel("% of its best")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
