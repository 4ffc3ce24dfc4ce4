"""A figure is written whole or not at all, twice the same, and can be drawn again without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from dart_lab.displays import figure as module
from dart_lab.displays import figure_names as names
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec, figure_spec, run_figure
from dart_lab.displays.figure_names import figure_names, figure_summaries
from dart_lab.errors import DartLabError
from dart_lab.probes.trace import REQUIRED, load_trace


def compute(options: FigureOptions, progress: bool) -> FigureData:
    table = pd.DataFrame({name: [0, 1] for name in REQUIRED})
    table = table.assign(kept=[True, False], method="toy", stage="LLM_LAYER")
    return FigureData(table, {"seed": options.seed, "progress": progress})


def draw(table: pd.DataFrame, facts: Any) -> Figure:
    figure = Figure()
    figure.subplots().bar([0, 1], table["kept"].astype(float))
    figure.suptitle(f"seed {facts['seed']}")
    return figure


class Point:
    """An installed entry point."""

    def __init__(self, spec: FigureSpec, value: str = "toy:FIGURE") -> None:
        self.name, self.value, self.spec = spec.name, value, spec

    def load(self) -> FigureSpec:
        return self.spec


class Points(list):
    @property
    def names(self) -> set[str]:
        return {point.name for point in self}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def _install(*points: Point) -> None:
        def find(group: str, name: str | None = None) -> Points:
            assert group == "dart_lab.figures"
            return Points(point for point in points if name in (None, point.name))

        for place in (module, names):
            monkeypatch.setattr(place, "entry_points", find)

    return _install


TOY = FigureSpec("toy", "a toy", compute, draw, lambda facts: [f"seed was {facts['seed']}"])


def test_four_files_the_same_each_time(install, tmp_path: Path) -> None:
    install(Point(TOY))
    heard: list[str] = []
    first = run_figure("toy", FigureOptions(out=tmp_path / "a", seed=3), echo=heard.append)
    second = run_figure("toy", FigureOptions(out=tmp_path / "b", seed=3), echo=heard.append)
    assert [path.name for path in first] == ["toy.parquet", "toy.json", "toy.png", "toy.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert heard == ["seed was 3"] * 2
    facts = json.loads(first[1].read_text())
    assert facts == {"figure": "toy", "seed": 3, "progress": False} == load_trace(first[0])[1]


def refuse(options: FigureOptions, progress: bool) -> FigureData:
    raise AssertionError("computed")


def test_drawn_again_from_the_table_gives_the_same_files_without_computing(install, tmp_path: Path) -> None:
    install(Point(TOY))
    first = run_figure("toy", FigureOptions(out=tmp_path / "a"))

    install(Point(FigureSpec("toy", "a toy", refuse, draw)))
    again = run_figure("toy", FigureOptions(out=tmp_path / "b"), from_file=first[0])
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


@pytest.mark.parametrize("wrong", ["compute", "draw"])
def test_a_failure_writes_nothing(install, tmp_path: Path, wrong: str) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    install(Point(FigureSpec("toy", "", fail if wrong == "compute" else compute, fail if wrong == "draw" else draw)))
    with pytest.raises(RuntimeError, match="broken"):
        run_figure("toy", FigureOptions(out=tmp_path / "new"))
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_way_is_found_before_computing(install, tmp_path: Path) -> None:
    install(Point(FigureSpec("toy", "", refuse, draw)))
    (tmp_path / "toy.json").mkdir()
    with pytest.raises(DartLabError, match=r"toy\.json is a folder"):
        run_figure("toy", FigureOptions(out=tmp_path))


def test_users_mistakes_are_named(install, tmp_path: Path) -> None:
    install(Point(TOY), Point(FigureSpec("other", "", compute, draw)))
    with pytest.raises(DartLabError, match=r"unknown figure 'toi'\. Did you mean 'toy'"):
        run_figure("toi", FigureOptions(out=tmp_path))
    path = run_figure("other", FigureOptions(out=tmp_path))[0]
    with pytest.raises(DartLabError, match="holds figure 'other', not 'toy'"):
        run_figure("toy", FigureOptions(out=tmp_path), from_file=path)
    with pytest.raises(DartLabError, match="is a file; give a folder"):
        run_figure("toy", FigureOptions(out=path))
    with pytest.raises(DartLabError, match="no such file"):
        run_figure("toy", FigureOptions(out=tmp_path), from_file=tmp_path / "gone.parquet")


def test_a_name_that_two_packages_claim_is_refused_but_one_seen_twice_is_not(install) -> None:
    install(Point(TOY), Point(TOY))
    assert figure_names() == ["toy"] and figure_spec("toy") is TOY
    install(Point(TOY), Point(TOY, "elsewhere:FIGURE"))
    with pytest.raises(DartLabError, match="offered twice: elsewhere:FIGURE, toy:FIGURE"):
        figure_spec("toy")


def test_naming_and_describing_figures_imports_none_of_them() -> None:
    code = (
        "import sys; from dart_lab.displays.figure_names import figure_summaries; print(figure_summaries()); "
        "heavy = {'torch', 'transformers', 'matplotlib', 'pandas', 'dart_lab.analysis.position_bias'}; "
        "assert not heavy & set(sys.modules), 'too much imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'position-bias': 'how often" in done.stdout


def test_the_lines_read_from_the_files_are_the_figures_own() -> None:
    assert figure_summaries() == {name: figure_spec(name).summary for name in figure_names()}
