"""The picture of the method table: accuracy of every method by family, and its paired difference to Random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dart_lab.displays.style import CHANCE, PALETTE
from dart_lab.errors import DartLabError

_ROW, _CELL, _NAMES, _GAP = 0.19, 0.52, 1.75, 2.6  # inches: a row, a family, the names, the panel of differences
_TOP, _BOTTOM = 1.0, 1.05
_MAP = "cividis"  # even steps of lightness for any colour vision
_DARK = 0.5  # share of the scale below which numbers are written in white


def draw_method_table(facts: Mapping[str, Any]) -> Figure:
    """Draw the facts of `dart_lab.analysis.method_table`: one row a method and budget, grouped by budget.

    Raises:
        DartLabError: there are no rows, or a fact is missing.
    """
    try:
        groups = _groups(facts)
        families = ["all", *facts["families"]]
        model, data, n, images, refused = (facts[name] for name in ("model", "data", "n", "images", "refused"))
    except KeyError as error:
        raise DartLabError(f"the facts of method-table lack {error}; make the figure again") from error
    if not groups:
        raise DartLabError("method-table has no rows to draw; run it with at least one method")
    rows = sum(len(group) for _, group in groups)
    height = _TOP + _BOTTOM + _ROW * (rows + 1.5 * (len(groups) - 1))
    width = _NAMES + _CELL * len(families) + _GAP + 0.35
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        len(groups), 2, width_ratios=[_CELL * len(families), _GAP],
        height_ratios=[len(group) for _, group in groups],
        left=_NAMES / width, right=1 - 0.15 / width, top=1 - _TOP / height, bottom=_BOTTOM / height,
        hspace=1.5 * len(groups) / rows, wspace=0.08,
    )  # fmt: skip
    limits = _limits(groups)
    for i, (title, group) in enumerate(groups):
        cells, gaps = figure.add_subplot(grid[i, 0]), figure.add_subplot(grid[i, 1])
        _draw_cells(cells, group, families, first=i == 0)
        cells.set_title(title, loc="left", pad=24 if i == 0 else 4, fontweight="bold")
        _draw_gaps(gaps, group, limits, last=i == len(groups) - 1)
    figure.suptitle("Accuracy under visual-token reduction", x=0.02, ha="left", y=1 - 0.22 / height)
    absent = ", ".join(dict.fromkeys(label.partition("@")[0] for label in refused)) or "none"
    figure.text(
        0.02, 0.1 / height,
        f"{model} on {data}: {n} questions on {images} pictures, exact match, percent. Right: paired difference to "
        "Random (one seed) at the same budget,\nin points, 95 % bootstrap over pictures; orange: below Random, filled: "
        "also by Holm's correction over all rows. Methods that cut at several\nlayers are matched by layer average "
        "where they reach it, all others by tokens kept; the facts hold both averages.\n"
        "Coarse picture: all tokens, of a picture with as many pixels. "
        f"Not run (the facts say why): {absent}.",
        fontsize=7.5, va="bottom",
    )  # fmt: skip
    return figure


def _groups(facts: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows by budget: floors and the unpruned model first, each budget's methods from best to worst."""
    rows = facts["rows"]
    ends = [row for row in rows if row["keep"] is None]
    groups = [(f"{facts['visual']} tokens, and floors", ends)] if ends else []
    for keep in sorted({row["keep"] for row in rows if row["keep"] is not None}, reverse=True):
        own = sorted((row for row in rows if row["keep"] == keep), key=lambda row: -row["accuracy"]["all"]["value"])
        groups.append((f"keep {keep}", own))
    return groups


def _draw_cells(axes: Axes, group: list[Mapping[str, Any]], families: list[str], *, first: bool) -> None:
    values = np.array([[row["accuracy"].get(family, {}).get("value", np.nan) for family in families] for row in group])
    axes.imshow(100 * values, cmap=_MAP, vmin=0, vmax=100, aspect="auto")
    for i, j in np.ndindex(values.shape):
        if np.isfinite(values[i, j]):
            colour = "white" if values[i, j] < _DARK else "black"
            weight = "bold" if j == 0 else "normal"
            axes.text(
                j, i, f"{100 * values[i, j]:.0f}", ha="center", va="center", color=colour, fontsize=7.5, weight=weight
            )
    axes.set_yticks(range(len(group)), [row["method"] for row in group], fontsize=8)
    axes.set_xticks(range(len(families)), families if first else [""] * len(families), fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.axvline(0.5, color="white", linewidth=2)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_gaps(axes: Axes, group: list[Mapping[str, Any]], limits: tuple[float, float], *, last: bool) -> None:
    axes.set_ylim(len(group) - 0.5, -0.5)
    axes.set_xlim(*limits)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    gaps = [row.get("minus_random") for row in group]
    if not any(gap is not None for gap in gaps):
        axes.set_axis_off()
        return
    axes.axvline(0, color=CHANCE, linewidth=1)
    for i, (row, gap) in enumerate(zip(group, gaps, strict=True)):
        if gap is None:
            axes.plot(0, i, marker="|", color=CHANCE, markersize=8)
            continue
        colour = PALETTE[5] if row["below_random"] else PALETTE[0]
        axes.plot([100 * gap["low"], 100 * gap["high"]], [i, i], color=colour, linewidth=1.2)
        open_mark = row["below_random"] and not row.get("below_random_holm")
        axes.plot(
            100 * gap["value"], i, marker="v" if row["below_random"] else "o", color=colour, markersize=4,
            markerfacecolor="white" if open_mark else colour,
        )  # fmt: skip
    axes.tick_params(axis="x", labelsize=8)
    if last:
        axes.set_xlabel("minus Random (points)")


def _limits(groups: list[tuple[str, list[Mapping[str, Any]]]]) -> tuple[float, float]:
    """One scale for all panels of differences."""
    ends = [100 * row["minus_random"][end] for _, group in groups for row in group if "minus_random" in row
            for end in ("low", "high")]  # fmt: skip
    low, high = min(ends, default=-1.0), max(ends, default=1.0)
    room = 0.05 * (high - low) or 1.0
    return min(low, 0.0) - room, max(high, 0.0) + room
