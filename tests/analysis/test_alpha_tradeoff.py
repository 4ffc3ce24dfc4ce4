"""The α trade-off on planted records: curves, the best α with its doubt, and what choosing it is worth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dart_lab.analysis.alpha_tradeoff import (
    ALPHAS,
    across_halves,
    adaptive_scores,
    best_alpha,
    compute,
    fastv_differs,
    measure,
)
from dart_lab.displays.figure import FigureOptions, run_figure
from dart_lab.errors import DartLabError
from tests.models import tiny_llava


def records(n: int = 80, seed: int = 0) -> pd.DataFrame:
    """Two tasks: "low" is right at α ≤ 0.3, "high" at α ≥ 0.7, with a few slips; α = 1 is FastV."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        task = ("low", "high")[i % 2]
        about = {"sample": i, "image_id": i // 2, "family": task, "question": f"a {task} question", "answer": "yes"}
        for alpha in ALPHAS:
            good = alpha <= 0.3 if task == "low" else alpha >= 0.7
            right = float(good if rng.random() < 0.95 else not good)
            rows.append({**about, "condition": f"{alpha:g} 64", "correct": right, "prediction": f"{right}"})
        rows.append({**rows[-1], "condition": "fastv 64"})
        rows += [
            {**about, "condition": name, "correct": c, "prediction": ""}
            for name, c in (("unpruned", 1.0), ("none kept", 0.0))
        ]
    return pd.DataFrame(rows)


def test_planted_curves_come_out() -> None:
    table = records()
    facts = measure(table, n_boot=200)
    low, high = facts["curves"]
    own = table[(table["family"] == "low") & (table["condition"] == "0.2 64")]["correct"].mean()
    assert low["scores"][ALPHAS.index(0.2)]["value"] == pytest.approx(own)
    assert low["best"]["value"] <= 0.3 and low["best"]["high"] <= 0.3
    assert high["best"]["value"] >= 0.7 and high["best"]["low"] >= 0.7
    assert low["halves"]["chosen"] > low["halves"]["middle"] + 0.5
    assert facts["floors"]["low"]["unpruned"]["value"] == 1.0 and facts["fastv_differs"] == 0


def test_choosing_by_task_or_by_the_question_wins_what_one_alpha_cannot() -> None:
    worth = measure(records(), n_boot=50)["adaptive"][0]
    score = {rule: worth[rule]["value"] for rule in ("fixed", "per_task", "predicted", "oracle")}
    assert score["fixed"] < 0.65
    assert min(score["per_task"], score["predicted"]) > 0.85
    assert score["oracle"] >= max(score["per_task"], score["fixed"])
    for rule, value in score.items():
        assert worth[rule]["gain"]["value"] == pytest.approx(value - score["fixed"])
        assert worth[rule]["low"] <= value <= worth[rule]["high"]
    assert worth["per_task"]["gain"]["low"] > 0.1 and worth["fixed"]["gain"]["high"] == 0


def test_noise_has_no_best_alpha_and_choosing_it_wins_nothing() -> None:
    """Coin flips: the interval of the best α is wide, and the chosen α does as well as any."""
    rng = np.random.default_rng(1)
    wide = pd.DataFrame(rng.integers(0, 2, (400, len(ALPHAS))).astype(float), columns=list(ALPHAS))
    wide["image_id"] = np.arange(400)
    best = best_alpha(wide, list(ALPHAS), seed=0, n_boot=500)
    assert best["high"] - best["low"] >= 0.5
    halves = across_halves(wide, list(ALPHAS), seed=0)
    assert abs(halves["chosen"] - 0.5) < 0.06 and halves["best"] > halves["chosen"]


def test_a_single_difference_from_fastv_is_counted() -> None:
    table = records(20)
    place = table.index[table["condition"] == "fastv 64"][3]
    table.loc[place, "prediction"] = "other"
    assert fastv_differs(table) == 1


def test_the_halves_do_not_depend_on_the_order_of_rows() -> None:
    table = records(60)
    sweep = table[table["condition"].str.match(r"^[\d.]+ ")].copy()
    sweep["alpha"] = sweep["condition"].str.split().str[0].astype(float)
    sweep["keep"] = 64
    first = adaptive_scores(sweep, list(ALPHAS), seed=3)
    assert first == adaptive_scores(sweep.sample(frac=1, random_state=0).sort_values("sample"), list(ALPHAS), seed=3)


def test_from_nothing_to_the_picture_and_again(tmp_path: Path) -> None:
    folder = tiny_llava(tmp_path / "model", grid=4)
    options = FigureOptions(model=str(folder), keep=(8, 4), n=8, out=tmp_path / "out", batch_size=4)
    said: list[str] = []
    paths = run_figure("alpha-tradeoff", options, echo=said.append)
    again = run_figure("alpha-tradeoff", FigureOptions(out=tmp_path / "b"), from_file=paths[0], echo=lambda _: None)
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(paths, again, strict=True))
    assert said[-1].endswith("FastV's: 0")
    table = pd.read_parquet(paths[0])
    assert len(table) == 8 * (2 + 2 * (1 + len(ALPHAS)))
    assert table.loc[table["condition"].str.endswith(" 4"), "got"].eq(4).all()


@pytest.mark.parametrize(
    ("options", "words"), [({"keep": (0.5,)}, "whole numbers"), ({"methods": ("dart",)}, "one method")]
)
def test_options_at_fault(options: dict[str, object], words: str) -> None:
    with pytest.raises(DartLabError, match=words):
        compute(FigureOptions(**options), False)  # type: ignore[arg-type]
