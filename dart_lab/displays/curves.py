"""Panels of curves and of dots with intervals: what the figures about scores are drawn with."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dart_lab.displays.style import CHANCE, PALETTE

Interval = Mapping[str, float]

MARKERS = "osv^DPX"
_BAND = 0.15
_PANEL_WIDTH, _PANEL_HEIGHT = 3.0, 2.5  # inches
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.65, 0.2, 1.05, 1.15
LEAST_SPAN = 4.0  # points that an axis of dots shows at least
_ROW = 0.24  # inches a row of dots


@dataclass(frozen=True)
class Curve:
    """One line: x, and value, low and high at each x."""

    label: str
    x: Sequence[float]
    y: Sequence[Interval]


@dataclass(frozen=True)
class Panel:
    """Curves that share axes; `levels` are horizontal lines, name → value."""

    title: str
    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    levels: Mapping[str, float]


def draw_curves(panels: Sequence[Panel], *, title: str, caption: str) -> Figure:
    """Curves with 95 % bands side by side, one legend for all; y in percent."""
    width = _LEFT + _PANEL_WIDTH * len(panels) + _RIGHT
    height = _TOP + _PANEL_HEIGHT + _BOTTOM
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        1, len(panels), left=_LEFT / width, right=1 - _RIGHT / width, top=1 - _TOP / height,
        bottom=_BOTTOM / height, wspace=0.28,
    )  # fmt: skip
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    handles: dict[str, Any] = {}
    for j, panel in enumerate(panels):
        axes = figure.add_subplot(grid[0, j])
        for curve in panel.curves:
            place = labels.index(curve.label)
            colour, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
            value, low, high = (np.array([100 * y[end] for y in curve.y]) for end in ("value", "low", "high"))
            axes.fill_between(curve.x, low, high, color=colour, alpha=_BAND, linewidth=0)
            (line,) = axes.plot(curve.x, value, color=colour, marker=marker, markersize=3.5, linewidth=1.3)
            handles[curve.label] = line
        for (name, level), style in zip(panel.levels.items(), ("-", ":", "--"), strict=False):
            handles[name] = axes.axhline(100 * level, color=CHANCE, linestyle=style, linewidth=1.2)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.xlabel)
        axes.set_ylabel(panel.ylabel if j == 0 else "")
    figure.suptitle(title, x=0.02, ha="left", y=1 - 0.12 / height)
    figure.legend(
        handles.values(), handles.keys(), loc="upper left", ncols=min(len(handles), 7), frameon=False, fontsize=8,
        bbox_to_anchor=(0.012, 1 - 0.36 / height), columnspacing=1.1, handlelength=1.6,
    )  # fmt: skip
    figure.text(0.02, 0.1 / height, caption, fontsize=7.5, va="bottom")
    return figure


@dataclass(frozen=True)
class Dots:
    """One row a label: an interval a column of dots; None leaves a place empty."""

    title: str
    xlabel: str
    rows: Mapping[str, Sequence[Interval | None]]
    series: Sequence[str]
    zero: float | None = None


def dots_height(panel: Dots) -> float:
    """Inches that a panel of dots wants."""
    return _ROW * max(len(panel.rows), 4)


def draw_dots(axes: Axes, panel: Dots, *, names: bool = True) -> None:
    """Dots with 95 % bars; a triangle and orange where a bar lies below zero."""
    step = 0.7 / max(len(panel.series), 1)
    for i, intervals in enumerate(panel.rows.values()):
        for j, found in enumerate(intervals):
            if found is None:
                continue
            at = i + (j - (len(panel.series) - 1) / 2) * step
            below = panel.zero is not None and found["high"] < panel.zero
            colour = PALETTE[5] if below else PALETTE[j % 5]
            axes.plot([100 * found["low"], 100 * found["high"]], [at, at], color=colour, linewidth=1.2)
            axes.plot(100 * found["value"], at, color=colour, marker="v" if below else MARKERS[j], markersize=3.5)
    if panel.zero is not None:
        axes.axvline(100 * panel.zero, color=CHANCE, linewidth=1)
    low, high = axes.get_xlim()
    if high - low < LEAST_SPAN:  # all the same: no room for a scale of hundredths
        axes.set_xlim((low + high - LEAST_SPAN) / 2, (low + high + LEAST_SPAN) / 2)
    axes.set_yticks(range(len(panel.rows)), list(panel.rows) if names else [""] * len(panel.rows), fontsize=8)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_xlabel(panel.xlabel)
    axes.set_title(panel.title)


def dots_legend(figure: Figure, panel: Dots, y: float) -> None:
    """What the columns of dots are, in one line at `y` of the figure's height."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=PALETTE[j % 5], marker=MARKERS[j], markersize=4, linewidth=1.2)
        for j in range(len(panel.series))
    ]
    figure.legend(handles, panel.series, loc="upper left", ncols=len(handles), frameon=False, fontsize=8,
                  bbox_to_anchor=(0.012, y), columnspacing=1.1)  # fmt: skip


def wrapped(text: str, width: int = 150) -> str:
    """Text in lines of at most `width` characters."""
    return "\n".join(textwrap.wrap(text, width))


def caption(facts: Mapping[str, Any], rest: str) -> str:
    """Model, data and numbers, then what else must be said."""
    return (
        f"{facts['model']} on {facts['data']}: {facts['n']} questions on {facts['images']} pictures, exact match; "
        f"95 %, bootstrap over pictures.\n{rest}"
    )
