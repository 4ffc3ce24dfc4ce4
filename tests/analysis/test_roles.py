"""The figures about roles: planted records come out as planted, and every figure runs on a small model with a book."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import dart_lab as dl
from dart_lab.analysis import attention_mass, role_distribution, role_positions, role_protection, role_removal
from dart_lab.displays.figure import FigureOptions, figure_spec, run_figure
from dart_lab.errors import DartLabError
from dart_lab.roles.identity import identity_of
from dart_lab.roles.labels import ROLES
from dart_lab.roles.rolebook import Rolebook
from dart_lab.vlm.states import visual_states
from tests.models import tiny_llava

FIGURES = ("attention-mass", "role-distribution", "role-map", "role-positions", "role-protection", "role-removal")
PICTURES = 40


def records(right: dict[str, Any], kept: dict[str, int] | None = None) -> pd.DataFrame:
    """One row a picture and condition; every picture has 30 dead and 70 alive tokens."""
    parts = []
    for condition, correct in right.items():
        part = pd.DataFrame({"condition": condition, "sample": np.arange(PICTURES), "image_id": np.arange(PICTURES)})
        part["family"], part["correct"], part["got"] = "all", np.asarray(correct, float), 50
        for role, size in zip(ROLES, (0, 0, 30, 70), strict=True):
            part[f"all {role}"], part[f"kept {role}"] = size, size
        for role, number in (kept or {}).items():
            if condition != "unpruned":
                part[f"kept {role}"] = number
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def test_protection_is_judged_against_random_tokens() -> None:
    number = np.arange(PICTURES)
    even, third = number % 2 == 0, number % 3 == 0
    found = role_protection.measure(
        records(
            {
                "m@50": even, "m@50+alive": even | third, "m@50+as many as alive#0": even,
                "m@50+as many as alive#1": even, "m@50+dead": even & ~third, "m@50+as many as dead#0": even | third,
                "m@50+as many as dead#1": even,
            },
            {"dead": 20, "alive": 30},
        ),
        ["m"], [50], ["dead", "alive"],
    )  # fmt: skip
    dead, alive = found["cells"]
    assert alive["gain"]["value"] == pytest.approx((third & ~even).mean()) and alive["control_gain"]["value"] == 0
    assert alive["over_control"]["value"] == pytest.approx(alive["gain"]["value"])
    assert alive["overflow"] == 1.0 and alive["already"] == 30 and dead["overflow"] == 0.0
    assert dead["over_control"]["value"] == pytest.approx(-(third & even).mean() - (third & ~even).mean() / 2)
    sentence = role_protection.verdict({"cells": found["cells"]})
    assert "helps more than protecting random tokens: alive with m at 50" in sentence and "harms, against" in sentence
    for cell in found["cells"]:
        cell["over_control"]["p_holm"] = 1.0
    assert "no proof" in role_protection.verdict({"cells": found["cells"]})
    assert "one role only" in role_protection.verdict({"cells": []})


def test_removal_is_told_from_removing_others() -> None:
    number = np.arange(PICTURES)
    right: dict[str, Any] = {"unpruned": number < 36}
    for label, *_ in role_removal.WAYS:
        right[f"dead@{label}"] = number < 35
    for label, _ in role_removal.MATCHES:
        right |= {f"dead@{label}#{seed}": number < 10 for seed in range(2)}
    facts = role_removal.measure(records(right), ["dead"])
    rows = {row["way"]: row for row in facts["rows"]}
    assert rows["dropped"]["gap"]["value"] == pytest.approx(-1 / PICTURES)
    assert rows["as many others"]["gap"]["value"] == pytest.approx(-26 / PICTURES)
    assert rows["dropped"]["removed"] == 30 and rows["dropped"]["short"] == 0
    assert role_removal.verdict(facts) == "dropping dead costs less than dropping as many others."


def test_shares_of_the_pruned_tokens() -> None:
    right = {"unpruned": np.ones(PICTURES), "m@60": np.ones(PICTURES)}
    facts = role_distribution.measure(records(right, {"dead": 10, "alive": 50}))
    (row,) = facts["rows"]
    assert row["share"]["dead"]["value"] == pytest.approx(0.5) and row["share"]["vit-sink"]["value"] == 0
    assert row["pruned"]["dead"]["value"] == pytest.approx(2 / 3)
    assert row["pruned"]["alive"]["value"] == pytest.approx(2 / 7) and row["pruned"]["llm-sink"] is None
    assert facts["whole"]["alive"] == pytest.approx(0.7)


def test_rows_and_contrast_of_roles() -> None:
    rows = np.repeat(np.arange(4), 4)
    table = pd.concat(
        [
            pd.DataFrame({"image_id": image, "row": rows, "role": np.where(rows == 3, "dead", "alive"),
                          "contrast": np.where(rows == 3, 1.0, 9.0)})
            for image in range(5)
        ]
    )  # fmt: skip
    facts = role_positions.measure(table)
    assert facts["by_row"]["dead"]["value"] == [0, 0, 0, 1] and facts["by_row"]["alive"]["low"] == [1, 1, 1, 0]
    assert facts["contrast"]["dead"] == {"median": 1.0, "flatter": 1.0}


def test_masses_are_means_over_pictures() -> None:
    keys = [*ROLES, "bos"]
    rows = [
        {"arm": "original", "sample": image, "image_id": image, "layer": layer, "key": key,
         "mass": {"dead": 0.1 * layer, "alive": 0.5, "bos": 0.5 - 0.1 * layer}.get(key, 0.0),
         "pairwise": np.nan if "sink" in key else 0.01, "keys": 0.0 if "sink" in key else 7.0}
        for image in range(4) for layer in (0, 1) for key in keys
    ]  # fmt: skip
    facts = attention_mass.measure(pd.DataFrame(rows))
    assert facts["mass"]["original"]["dead"]["value"] == pytest.approx([0.0, 0.1])
    assert facts["text"]["original"] == pytest.approx([0.5, 0.4])
    assert facts["pairwise"]["original"]["vit-sink"]["value"] == [None, None]
    assert facts["tokens"]["original"]["alive"] == 7.0


@pytest.fixture(scope="module")
def with_book(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small random model and a book that calls about a third of its tokens dead."""
    folder = tiny_llava(tmp_path_factory.mktemp("model") / "small", grid=4)
    vlm = dl.load(folder)
    sample = dl.load_task("shapes", n=1, seed=5)[0]
    embeds = visual_states(vlm, vlm.prepare([sample.image], [sample.question]))[0].embeds
    unit = torch.nn.functional.normalize(embeds, dim=-1)
    centroids = {"dead": unit[:1], "alive": torch.nn.functional.normalize(torch.ones(1, unit.shape[1]), dim=-1) * -1}
    cosine = float((unit @ unit[0]).quantile(0.67))
    half = {"value": 0.5, "low": 0.4, "high": 0.6, "per picture": 8.0}
    none = dict.fromkeys(half, 0.0)
    book = Rolebook(
        identity=identity_of(vlm), pool={"name": "planted", "pictures": 2, "tokens": 32, "skipped": []}, vit_cut=None,
        channels=(), layers=(2,), energy=0.1, often=0.5, dead_cut=0.9, dead_cosine=cosine, centroids=centroids,
        words={}, prevalence={"vit-sink": none, "llm-sink": none, "dead": half, "alive": half},
        evidence={"why": {}, "rules without a run": {}},
    )  # fmt: skip
    return folder, book.save(tmp_path_factory.mktemp("book") / "book")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_runs_and_comes_back_from_its_records(
    with_book: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    folder, book = with_book
    said: list[str] = []
    budget = None if name in ("role-map", "role-positions", "role-removal") else (6,)
    methods = ("fastv", "divprune") if name in ("role-distribution", "role-protection") else None
    options = FigureOptions(
        model=str(folder), n=4, keep=budget, methods=methods, layer=2, out=tmp_path, rolebook=book, batch_size=3
    )
    run_figure(name, options, echo=said.append)
    facts = json.loads((tmp_path / f"{name}.json").read_text())
    assert facts["roles"] == ["dead", "alive"] and facts["images"] == 4
    assert said[0].startswith("pool: 2 pictures of planted")
    again = run_figure(name, FigureOptions(out=tmp_path / "again"), from_file=tmp_path / f"{name}.parquet")
    for path in again:
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_a_book_of_another_model_is_refused(with_book: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny_llava(tmp_path / "other", grid=4, seed=1)
    options = FigureOptions(model=str(other), n=2, rolebook=with_book[1], out=tmp_path)
    with pytest.raises(DartLabError, match="other weights"):
        figure_spec("role-positions").compute(options, False)


def test_a_figure_takes_other_definitions(with_book: tuple[Path, Path], tmp_path: Path) -> None:
    folder, book = with_book
    options = FigureOptions(model=str(folder), n=4, out=tmp_path, rolebook=book, rules={"dead": "none"})
    said: list[str] = []
    for name in ("role-positions", "role-map"):
        run_figure(name, options, echo=said.append)
        facts = json.loads((tmp_path / f"{name}.json").read_text())
        assert facts["roles"] == ["alive"] and "--rules dead=none" in facts["command"]
        assert any("here roles by dead=none" in line and "alive 100.0 %" in line for line in said)
    assert facts["shares"]["thresholds"]["alive"] == 1 > facts["shares"]["nearest centroid"]["alive"]
