"""Heat maps share one scale, centred at chance, told apart with any colour vision."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dart_lab.displays.heatmap import RATE, heat_map, rate_colorbar
from dart_lab.displays.style import DIVERGING, PALETTE, house_style, pdf_bytes, png_bytes
from dart_lab.errors import DartLabError

# Machado, Oliveira and Fernandes (2009), severity 1.0, linear RGB
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
PROTANOPIA = np.array(
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
)


def seen(rgb: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    return np.clip((rgb**2.2) @ matrix.T, 0, 1) ** (1 / 2.2)


def test_the_scale_is_the_same_for_all_data_and_chance_is_its_white_middle() -> None:
    ax = Figure().subplots(1, 2)
    weak, strong = heat_map(ax[0], [[0.9, 1.1]]), heat_map(ax[1], [[0.0, 9.0]])
    assert weak.norm is strong.norm is RATE
    assert min(weak.to_rgba(1.0)[:3]) > 0.95
    below, above = weak.to_rgba(0.5), weak.to_rgba(1.5)
    assert below[2] > below[0] and above[0] > above[2], "blue below chance, red above"
    assert strong.to_rgba(9.0) == strong.to_rgba(2.0), "beyond the scale: its last colour"


def test_cells_are_drawn_as_given() -> None:
    rates = np.random.default_rng(0).random((5, 7)) * 2
    assert (heat_map(Figure().subplots(), rates).get_array() == rates).all()


@pytest.mark.parametrize("matrix", [DEUTERANOPIA, PROTANOPIA])
def test_colours_are_told_apart_with_any_colour_vision(matrix: np.ndarray) -> None:
    ends = seen(np.array([mpl.colormaps[DIVERGING](x)[:3] for x in (0.2, 0.5, 0.8)]), matrix)
    lines = seen(np.array([to_rgb(colour) for colour in PALETTE]), matrix)
    for colours, least in ((ends, 0.2), (lines, 0.12)):
        distance = np.linalg.norm(colours[:, None] - colours[None], axis=2)
        assert distance[~np.eye(len(colours), dtype=bool)].min() > least


@pytest.mark.parametrize("bad", [[1.0, 2.0], [[np.nan]], [[-0.1]]])
def test_what_is_no_map_is_refused(bad: list) -> None:
    with pytest.raises(DartLabError, match="finite rates"):
        heat_map(Figure().subplots(), bad)


def test_the_key_names_chance() -> None:
    figure = Figure()
    bar = rate_colorbar(figure, figure.subplots())
    assert [label.get_text() for label in bar.ax.get_yticklabels()] == ["0", "½", "1", "1½", "2×"]


def test_the_same_figure_is_the_same_bytes_whatever_the_users_settings() -> None:
    def draw() -> tuple[bytes, bytes]:
        with house_style():
            figure = Figure()
            heat_map(figure.subplots(), [[0.0, 1.0]])
            figure.suptitle("title")
        return png_bytes(figure), pdf_bytes(figure)

    first = draw()
    with mpl.rc_context({"font.size": 30, "figure.facecolor": "red", "savefig.dpi": 20, "pdf.compression": 0}):
        second = draw()
        assert mpl.rcParams["font.size"] == 30, "the user's settings come back"
    assert first == second
