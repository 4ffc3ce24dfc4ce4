"""Figures about scores on planted records, and each of them from nothing and again from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dart_lab.analysis import budget_curve, error_bound, layer_ablation, pivot_ablation, random_baseline
from dart_lab.displays.figure import FigureOptions, run_figure
from dart_lab.errors import DartLabError
from tests.models import tiny_llava

N = 40


def planted(right: dict[str, Any], **more: Any) -> pd.DataFrame:
    """Records in which each condition is right on the questions that a mask says."""
    number = np.arange(N)
    about = {"sample": number, "image_id": number // 2, "family": np.where(number % 2, "odd", "even")}
    parts = [pd.DataFrame({**about, "condition": name, "correct": np.asarray(mask, float), **more.get(name, {})})
             for name, mask in right.items()]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def test_methods_below_chance_are_counted_by_family() -> None:
    number = np.arange(N)
    odd = number % 2 == 1
    facts = random_baseline.measure(
        planted({"random": odd | (number % 4 == 0), "uniform-grid": odd, "worse": odd & False, "better": odd | True})
    )
    assert facts["counts"]["random"]["worse"] == {"below": 2, "above": 0, "of": 2}
    assert facts["counts"]["random"]["better"] == {"below": 0, "above": 1, "of": 2}
    assert facts["gaps"]["random"]["worse"]["odd"]["value"] == -1.0
    assert facts["gaps"]["uniform-grid"]["random"]["all"]["value"] == pytest.approx(0.25)
    assert facts["gaps"]["random"]["worse"]["odd"]["p_holm"] <= 0.01


def test_retention_is_a_ratio_on_the_same_questions() -> None:
    number = np.arange(N)
    tokens = {"got": 0.0, "processed": 0.0, "output": 0.0}
    half = {"got": 64.0, "processed": 192.0, "output": 128.0}
    table = planted(
        {"unpruned": number < 32, "none kept": number < 4, "dart@64": number < 16},
        **{"unpruned": tokens, "none kept": tokens, "dart@64": half},
    )
    facts = budget_curve.measure(table, n_boot=400)
    row = facts["methods"]["dart"][0]
    assert row["retention"]["value"] == 0.5 and facts["none_kept"] == 4 / 32
    assert row["retention"]["low"] < 0.5 < row["retention"]["high"]
    assert (row["got"], row["processed"], row["output"]) == (64.0, 192.0, 128.0)


def test_curves_over_layers_are_sorted_into_methods_and_families() -> None:
    number = np.arange(N)
    facts = layer_ablation.measure(
        planted({"unpruned": number >= 0, "none kept@0@1": number < 0, "none kept@0@2": number % 2 == 1,
                 "dart@64@1": number < 20, "dart@64@2": number < 30}),
        n_boot=50,
    )  # fmt: skip
    assert facts["curves"]["dart 64"]["layers"] == [1, 2]
    assert [y["value"] for y in facts["curves"]["dart 64"]["all"]] == [0.5, 0.75]
    assert [y["value"] for y in facts["curves"]["none kept"]["odd"]] == [0.0, 1.0]
    assert facts["unpruned"] == {"all": 1.0, "even": 1.0, "odd": 1.0}


def test_bounds_that_fail_are_counted() -> None:
    rows = [{"sample": i, "image_id": i, "keep": 8, "hausdorff": 2.0 if i < 3 else 1.0, "bound": 1.5, "moved": 0.1 * i,
             "equal_norms": i == 0} for i in range(10)]  # fmt: skip
    facts = error_bound.measure(pd.DataFrame(rows), n_boot=50)
    row = facts["budgets"][0]
    assert row["violated"] == 0.3 and row["equal_norms"] == 0.1
    assert row["tightness"]["value"] == pytest.approx((3 * 2 + 7) / 15)
    assert row["lipschitz"] == pytest.approx(0.9) and facts["correlation"] < 0


def test_every_kind_of_pivots_is_there() -> None:
    groups = pivot_ablation.variants(64, 2, 0)
    assert set(groups["choice"]) == set(pivot_ablation.PUBLISHED)
    assert [d.image_pivots for d in groups["number"].values()] == [1, 2, 4, 8, 16]
    assert all(d.keep == 64 for own in groups.values() for d in own.values())
    assert list(pivot_ablation.variants(4, 2, 0)["number"]) == ["1 + 1", "2 + 2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava(tmp_path_factory.mktemp("sweeps") / "model", grid=4, layers=5, vision_layers=3)


FIGURES = {
    "budget-curve": {"model": "tiny", "methods": ("dart", "divprune"), "keep": (64, 16), "n": 4},
    "layer-ablation": {"methods": ("dart",), "keep": (4,)},
    "random-baseline": {"methods": ("dart", "fastervlm", "vla-pruner"), "keep": (4,)},
    "pivot-ablation": {"keep": (8,)},
    "error-bound": {"keep": (8, 4)},
}


@pytest.mark.parametrize("name", FIGURES)
def test_from_nothing_to_the_picture_and_again(name: str, model: Path, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"model": str(model), "n": 6, **FIGURES[name]}
    options = FigureOptions(out=tmp_path / "out", batch_size=3, **chosen)
    said: list[str] = []
    paths = run_figure(name, options, echo=said.append)
    again = run_figure(name, FigureOptions(out=tmp_path / "again"), from_file=paths[0], echo=lambda _: None)
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(paths, again, strict=True)] == [True] * 4
    twice = run_figure(name, FigureOptions(**{**vars(options), "out": tmp_path / "twice"}), echo=lambda _: None)
    assert paths[0].read_bytes() == twice[0].read_bytes()
    assert said and all("\n" not in line for line in said)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("layer-ablation", {"methods": ("divprune",), "keep": (4,)}, "does not cut once"),
        ("random-baseline", {"keep": (8, 4)}, "one budget"),
        ("pivot-ablation", {"methods": ("fastv",)}, "leave --methods out"),
        ("pivot-ablation", {"keep": (8, 4)}, "one budget"),
        ("error-bound", {"n": 1}, "two questions"),
        ("budget-curve", {"keep": (0.5,)}, "whole numbers"),
        ("budget-curve", {"methods": ("dart",), "keep": (4,)}, "answers nothing right"),
    ],
)
def test_options_at_fault(name: str, options: dict[str, Any], words: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(DartLabError, match=words):
        run_figure(name, FigureOptions(**{"model": str(model), "n": 4, "out": tmp_path / "out", **options}))
    assert not (tmp_path / "out").exists()
