"""Colours of the roles, and the panels that only figures about roles need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from dart_lab.displays.style import PALETTE

ROLE_COLOURS: Mapping[str, str] = MappingProxyType(
    {"vit-sink": PALETTE[5], "llm-sink": PALETTE[3], "dead": "#9A9A9A", "alive": PALETTE[0]}
)
_BAR, _DOT = 0.72, 3.0


def draw_shares(
    axes: Axes, bars: Sequence[Mapping[str, float]], names: Sequence[str], tops: Sequence[str], roles: Sequence[str]
) -> None:
    """Stacked bars of shares in percent, each with a word above it."""
    bottom = np.zeros(len(bars))
    for role in roles:
        values = 100 * np.array([bar[role] for bar in bars])
        axes.bar(range(len(bars)), values, _BAR, bottom=bottom, color=ROLE_COLOURS[role], edgecolor="white")
        bottom += values
    for place, top in enumerate(tops):
        axes.text(place, 101.5, top, ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(bars)), names)
    axes.set_ylim(0, 100)


def draw_scatter(axes: Axes, points: NDArray[np.floating], labels: Sequence[str], roles: Sequence[str]) -> None:
    """Points `(n, 2)` coloured by role; frequent roles are drawn first, so that rare ones are seen."""
    label = np.asarray(labels)
    for role in sorted(roles, key=lambda role: -(label == role).sum()):
        here = points[label == role]
        axes.scatter(here[:, 0], here[:, 1], s=_DOT, color=ROLE_COLOURS[role], linewidths=0, rasterized=True)
    axes.set_xticks([])
    axes.set_yticks([])
