"""The overlay figure: as many bright cells as tokens kept, from its records alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dart_lab.analysis import kept_overlay
from dart_lab.displays.figure import FigureOptions, run_figure
from dart_lab.errors import DartLabError
from tests.models import tiny_llava


def test_tiny_shows_64_bright_cells_of_576(tmp_path: Path) -> None:
    """Cells are 14 pixels: those that equal the picture are the kept ones, the others are veiled."""
    data = kept_overlay.compute(FigureOptions(methods=("dart",), n=1), False)
    figure = kept_overlay.draw(data.table, data.facts)
    shown = np.asarray(figure.axes[0].images[0].get_array())
    import dart_lab as dl

    picture = np.asarray(dl.load_task("shapes", n=1, seed=0)[0].image)
    scale = shown.shape[0] // picture.shape[0]
    cells = shown[::scale, ::scale][7::14, 7::14]
    bright = (cells == picture[7::14, 7::14]).all(axis=2)
    assert bright.shape == (24, 24) and bright.sum() == 64 == int(data.table["kept"].sum())
    kept = data.table[data.table["kept"]]
    assert bright[kept["row"], kept["column"]].all()


def test_from_nothing_and_again_from_its_records(tmp_path: Path) -> None:
    folder = tiny_llava(tmp_path / "model", grid=4)
    options = FigureOptions(model=str(folder), methods=("dart", "fastervlm"), keep=(5,), n=2, out=tmp_path / "out")
    paths = run_figure("kept-overlay", options, echo=lambda _: None)
    again = run_figure("kept-overlay", FigureOptions(out=tmp_path / "b"), from_file=paths[0], echo=lambda _: None)
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(paths, again, strict=True))
    table = pd.read_parquet(paths[0])
    assert table.groupby(["sample", "method"], observed=True)["kept"].sum().tolist() == [5] * 4


def test_too_much_for_a_figure_is_refused() -> None:
    for options in (FigureOptions(n=13), FigureOptions(keep=(4, 8))):
        with pytest.raises(DartLabError, match="one budget on at most 12 pictures"):
            kept_overlay.compute(options, False)
