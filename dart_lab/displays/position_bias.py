"""The picture of position bias: maps, row marginals and the upside-down test, one row a method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dart_lab.displays.heatmap import heat_map, rate_colorbar
from dart_lab.displays.style import CHANCE, PALETTE
from dart_lab.errors import DartLabError

Conditions = Mapping[tuple[str, str], Mapping[str, Any]]

_TICKS = 4  # marks on the axis of row rates, at most
# inches: a heat map, a panel to its right, and the margins
_MAP, _SIDE = 1.55, 1.75
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.45, 0.15, 1.05, 1.35
_PLACE, _CONTENT = PALETTE[0], PALETTE[5]


def draw_position_bias(facts: Mapping[str, Any]) -> Figure:
    """Draw what `measure` of `dart_lab.analysis.position_bias` reports.

    Args:
        facts: `model`, `data`, `layer`, `n`, `images`, `n_boot` and `conditions`, one entry for each method and budget,
            with `stage`, `layer`, `rate` (rows, columns), `rows` and, if pictures were turned, `content_shift`.

    Raises:
        DartLabError: no conditions, or a fact is missing.
    """
    try:
        conditions = {(c["method"], c["keep"]): c for c in facts["conditions"]}
        methods, budgets = _in_order(m for m, _ in conditions), _in_order(k for _, k in conditions)
        if not conditions:
            raise DartLabError("position-bias has no conditions to draw; run it with at least one method and budget")
        return _draw(facts, conditions, methods, budgets)
    except KeyError as error:
        raise DartLabError(f"the facts of position-bias lack {error}; make the figure again") from error


def _draw(
    facts: Mapping[str, Any], conditions: Conditions, methods: Sequence[str], budgets: Sequence[str]
) -> Figure:
    shifted = all("content_shift" in c for c in conditions.values())
    sides = 1 + 2 * shifted
    width = _LEFT + _MAP * len(budgets) + _SIDE * sides + _RIGHT
    height = _TOP + _MAP * len(methods) + _BOTTOM
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        len(methods), len(budgets) + sides, width_ratios=[_MAP] * len(budgets) + [_SIDE] * sides,
        left=_LEFT / width, right=1 - _RIGHT / width, top=1 - _TOP / height, bottom=_BOTTOM / height,
        wspace=0.17, hspace=0.1,
    )
    widest = max(max(c["rows"]["high"]) for c in conditions.values())
    for i, method in enumerate(methods):
        row = [conditions[method, keep] for keep in budgets]
        for j, condition in enumerate(row):
            ax = figure.add_subplot(grid[i, j])
            heat_map(ax, condition["rate"])
            if j == 0:
                ax.set_ylabel(method + _stage(condition, facts["layer"]), fontsize=10.5, fontweight="bold")
            if i == 0:
                ax.set_title(f"{condition['got']:g} kept")
        last = i == len(methods) - 1
        _rows(figure.add_subplot(grid[i, len(budgets)]), row, widest, first=i == 0, last=last)
        for k, what in enumerate(("maps", "pictures")[: 2 * shifted]):
            _shift(figure.add_subplot(grid[i, len(budgets) + 1 + k]), row, what, first=i == 0, last=last, labels=k == 0)
    bar_width = _MAP * min(len(budgets), 2)
    bar = figure.add_axes((_LEFT / width, (_BOTTOM - 0.26) / height, bar_width / width, 0.11 / height))
    rate_colorbar(figure, bar, orientation="horizontal").set_label("how often kept, × chance", labelpad=1)
    _words(figure, facts, shifted)
    return figure


def _rows(ax: Axes, row: Sequence[Mapping[str, Any]], widest: float, *, first: bool, last: bool) -> None:
    """How often each grid row is kept, with intervals, over the band of chance; the top row on top."""
    for shade, condition in enumerate(row):
        stats = {name: np.asarray(x) for name, x in condition["rows"].items()}
        y = np.arange(len(stats["value"]))
        if shade == 0:  # the smallest budget has the widest band
            ax.fill_betweenx(y, stats["null_low"], stats["null_high"], color=CHANCE, alpha=0.45, linewidth=0)
        colour = PALETTE[shade % len(PALETTE)]
        ax.fill_betweenx(y, stats["low"], stats["high"], color=colour, alpha=0.25, linewidth=0)
        ax.plot(stats["value"], y, color=colour, linewidth=1.0, label=f"{condition['got']:g} kept")
    ax.axvline(1, color="0.35", linewidth=0.7, linestyle=":")
    ticks = range(0, math.ceil(widest) + 1, max(1, math.ceil(widest / _TICKS)))
    ax.set(xlim=(0, max(2.0, 1.05 * widest)), ylim=(len(y) - 0.5, -0.5), xticks=ticks, yticks=[])
    ax.set_xticklabels([f"{tick}×" for tick in ticks] if last else [])
    if first:
        ax.set_title("by grid row,\nintervals; grey: chance")
    if last:
        ax.legend(
            frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=1 + (len(row) - 1) // 3,
            handlelength=1.2, labelspacing=0.2, columnspacing=0.8,
        )


def _shift(ax: Axes, row: Sequence[Mapping[str, Any]], what: str, *, first: bool, last: bool, labels: bool) -> None:
    """Agreement with the kept cells of the picture upside down: by place on the canvas, and by content."""
    for i, condition in enumerate(row):
        for name, marker, colour, step in (("canvas", "s", _PLACE, -0.14), ("content", "o", _CONTENT, 0.14)):
            stat = condition["content_shift"][what][name]
            ax.plot([stat["low"], stat["high"]], [i + step] * 2, color=colour, linewidth=1.6)
            ax.plot(stat["value"], i + step, marker, color=colour, markersize=5)
    ax.axvline(0, color="0.35", linewidth=0.7, linestyle=":")
    ax.set(xlim=(-1.08, 1.08), ylim=(len(row) - 0.5, -0.5), xticks=[-1, 0, 1], yticks=range(len(row)))
    ax.set_xticklabels(["−1", "0", "1"] if last else [])
    ax.set_yticklabels([f"{condition['got']:g}" for condition in row] if labels else [])
    if first:
        ax.set_title({"maps": "upside down:\nmean map", "pictures": "upside down:\neach picture"}[what])


def _words(figure: Figure, facts: Mapping[str, Any], shifted: bool) -> None:
    """Title, key of the flipped panels, and what the intervals are."""
    width, height = figure.get_figwidth(), figure.get_figheight()
    left, right = _LEFT / width, 1 - _RIGHT / width

    def write(x: float, inches: float, text: str, **style: Any) -> None:
        figure.text(x, inches / height, text, **style)

    write(left, height - 0.12, "Where the kept visual tokens lie", fontsize=13, fontweight="bold", va="top")
    write(
        left, height - 0.42,
        f"model {facts['model']} · data {facts['data']} · n = {facts['n']} questions on {facts['images']} pictures · "
        f"pruned before decoder layer K = {facts['layer']}", va="top",
    )
    notes = ["Bands, bars: 95 % over pictures (bootstrap; mean map: jackknife). Chance: 95 % of uniform samplers."]
    if shifted:
        notes = [
            "Pruned again upside down: a bias of position stays in place, a liking for content moves along.",
            "A mean map that is symmetric from top to bottom agrees both ways; then look at each picture.",
            *notes,
        ]
        key = {"va": "top", "fontweight": "bold"}
        says = "correlation with the flipped picture's kept cells"
        write(right, _BOTTOM - 0.3, says, ha="right", va="top", fontsize=8.5)
        write(right - _SIDE / width, _BOTTOM - 0.5, "■ same place", color=_PLACE, ha="center", **key)
        write(right, _BOTTOM - 0.5, "● same content", color=_CONTENT, ha="right", **key)
    write(left, 0.1, "\n".join(notes), va="bottom", fontsize=8, linespacing=1.25)


def _stage(condition: Mapping[str, Any], layer: int) -> str:
    """Where a method acts, if not before the layer that the title names."""
    if condition["stage"] != "LLM_LAYER":
        return f"\n({condition['stage'].lower().replace('_', ' ')})"
    return "" if condition["layer"] == layer else f"\n(K = {condition['layer']})"


def _in_order(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
