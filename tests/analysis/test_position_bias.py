"""The command from model to picture: budgets kept, batches without influence, the flip the right way round."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from dart_lab.analysis.position_bias import FIGURE, collect, compute, lines, measure
from dart_lab.displays.figure import FigureOptions, run_figure
from dart_lab.errors import DartLabError
from dart_lab.probes.trace import check_trace
from tests.models import tiny_llava

GRID = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llava(tmp_path_factory.mktemp("models") / "random-llava", grid=GRID))


@pytest.fixture(scope="module")
def options(model: str) -> FigureOptions:
    return FigureOptions(model=model, keep=(6, 0.5), n=6, seed=3, batch_size=4)


@pytest.fixture(scope="module")
def data(options: FigureOptions):
    return compute(options)


def test_every_condition_keeps_its_budget_on_every_picture(data) -> None:
    check_trace(data.table)
    expected = [(method, keep) for method in ("dart", "fastv", "random", "uniform-grid") for keep in ("6", "0.5")]
    assert [(c["method"], c["keep"]) for c in data.facts["conditions"]] == expected
    for condition in data.facts["conditions"]:
        expected = 6 if condition["keep"] == "6" else 18
        assert condition["got"] == condition["asked"] == expected
        assert condition["retention_ratio"] == pytest.approx(expected / GRID**2, rel=1e-5)
        assert np.mean(condition["rate"]) == pytest.approx(1, rel=1e-4)
    counts = data.table.groupby(["method", "keep", "flip", "sample"], observed=True)["kept"].sum()
    assert len(counts) == 4 * 2 * 2 * 6
    assert set(counts.xs("6", level="keep")) == {6} and set(counts.xs("0.5", level="keep")) == {18}


def test_facts_tell_how_to_make_it_again(data, options: FigureOptions) -> None:
    assert data.facts["command"].startswith(f"dart-lab figure position-bias --model {options.model} --data shapes")
    assert "--keep 6,0.5 --layer 2 --n 6 --seed 3" in data.facts["command"]
    assert data.facts["provenance"]["weights_sha256"] and data.facts["provenance"]["versions"]["torch"]
    assert data.facts["task"]["seed"] == 3
    assert all("another model" in published["model"] for published in data.facts["published"])


def test_batches_have_no_influence_also_on_a_users_folder(options: FigureOptions, tmp_path: Path) -> None:
    """Noise pictures: no two patches are alike, so no near-ties are decided by rounding."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(5):
        Image.fromarray(rng.integers(0, 256, (84, 84, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "question": "what shape ?", "answer": "circle"})
    pd.DataFrame(rows).to_csv(tmp_path / "questions.csv", index=False)
    own = dataclasses.replace(options, data=str(tmp_path), n=5)
    tables = [compute(dataclasses.replace(own, batch_size=size)).table for size in (1, 4)]
    order = ["method", "keep", "flip", "sample", "row", "column"]
    one, four = (table.sort_values(order)["kept"].to_numpy() for table in tables)
    assert (one == four).all()


def test_a_method_that_draws_does_not_repeat_its_draw_on_the_flipped_picture(data) -> None:
    shift = {(c["method"], c["keep"]): c["content_shift"]["pictures"] for c in data.facts["conditions"]}
    assert abs(shift["random", "0.5"]["canvas"]["value"]) < 0.4
    assert shift["uniform-grid", "6"]["canvas"]["value"] == 1.0


def test_one_line_a_condition_and_other_models_are_marked(data) -> None:
    said = lines(data.facts)
    assert len(said) == 8 + 2
    assert said[0].startswith("dart") and "6 kept" in said[0] and "upside down" in said[0]
    assert all("another model; not measured here" in line for line in said[8:])


@dataclasses.dataclass(frozen=True)
class Named:
    """Stands for a pruner: the fake `select` below decides by its place in the list."""

    seed: int = 0


def fake_select(vlm: Any, inputs: list[Image.Image], pruners: list) -> list:
    """Runs that keep the four brightest cells of each 6 × 6 picture, and runs that keep four of the last row."""

    def table(kind: str) -> pd.DataFrame:
        parts = []
        for number, picture in enumerate(inputs):
            light = np.asarray(picture.resize((GRID, GRID), Image.Resampling.BOX).convert("L")).ravel()
            kept = np.zeros(GRID**2, dtype=bool)
            kept[np.argsort(-light.astype(int), kind="stable")[:4] if kind == "bright" else np.arange(30, 34)] = True
            row, column = np.divmod(np.arange(GRID**2), GRID)
            parts.append(pd.DataFrame({"sample": number, "row": row, "column": column, "kept": kept}))
        rest = dict.fromkeys(("image", "frame", "crop"), 0) | {"layer": 2, "asked": 4, "got": 4, "stage": "LLM_LAYER"}
        return pd.concat(parts, ignore_index=True).assign(**rest)

    return [SimpleNamespace(table=lambda kind=kind: table(kind)) for kind in ("bright", "place")]


def test_content_moves_and_place_stays_when_pictures_are_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dart_lab.vlm.select.select", fake_select)
    rng = np.random.default_rng(0)
    samples = []
    for number in range(8):
        cells = np.zeros((GRID, GRID), dtype=np.uint8)
        cells.ravel()[rng.permutation(12)[:4]] = 255  # bright in the two upper rows
        picture = Image.fromarray(cells).resize((60, 60), Image.Resampling.NEAREST).convert("RGB")
        samples.append(SimpleNamespace(image=picture, question="what?", image_id="", id=f"s{number}"))
    vlm = SimpleNamespace(prepare=lambda images, questions: images)
    pruners = {("bright", "4"): Named(), ("place", "4"): Named()}
    tables = [collect(vlm, samples, pruners, flip=flip, batch_size=3) for flip in ("none", "vertical")]
    found = measure(pd.concat(tables, ignore_index=True), n_boot=50, n_null=50)
    assert found["n"] == found["images"] == 8 and found["grid"] == [GRID, GRID]
    bright, place = (c["content_shift"]["pictures"] for c in found["conditions"])
    assert bright["content"]["value"] == 1.0 and bright["canvas"]["value"] < 0
    assert place["canvas"]["value"] == 1.0 and place["content"]["value"] < 0
    assert found["conditions"][0]["bottom_third"]["value"] == 0 and found["conditions"][1]["bottom_third"]["value"] == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"methods": ("fastw",)}, "Did you mean 'fastv'"),
        ({"keep": (0,)}, "keep=0"),
        ({"keep": (37,)}, "37"),
        ({"layer": 0}, "layer=0"),
        ({"n": 1}, "n=1: at least 2 samples"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"data": "shape"}, "shapes"),
        ({"model": "tini"}, "tiny"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    options: FigureOptions, tmp_path: Path, change: dict, says: str
) -> None:
    with pytest.raises(DartLabError) as error:
        run_figure("position-bias", dataclasses.replace(options, out=tmp_path, **change))
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_command_twice_gives_the_same_bytes_and_can_be_drawn_again_without_torch(
    options: FigureOptions, tmp_path: Path
) -> None:
    small = dataclasses.replace(options, methods=("fastv",), n=4)
    first = run_figure("position-bias", dataclasses.replace(small, out=tmp_path / "a"), echo=lambda line: None)
    second = run_figure("position-bias", dataclasses.replace(small, out=tmp_path / "b"), echo=lambda line: None)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    code = (
        "import sys; from pathlib import Path; from dart_lab.displays.figure import FigureOptions, run_figure; "
        f"run_figure('position-bias', FigureOptions(out=Path({str(tmp_path / 'c')!r})), from_file={str(first[0])!r}); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in first:
        assert (tmp_path / "c" / path.name).read_bytes() == path.read_bytes(), path.name
    assert json.loads(first[1].read_text())["figure"] == FIGURE.name
