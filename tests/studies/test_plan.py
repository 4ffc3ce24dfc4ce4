"""Studies as objects and as files: grids, baselines, unknown keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart_lab.errors import DartLabError
from dart_lab.pruners import FastV, Windowed
from dart_lab.studies.plan import NONE_KEPT, UNPRUNED, Grid, Study, TaskSpec, read_study, study_from

FILE = """
model = "tiny"
batch_size = 4
[[tasks]]
name = "shapes"
n = 12
families = ["exist", "text"]
[[conditions]]
method = "alpha"
alpha = [0.0, 0.5, 1.0]
keep = [64, 0.25]
[[conditions]]
text = "2:fastv:0.5;8:dart:0.25"
[[conditions]]
method = "fastv"
keep = 64
wrapper = "windowed"
[conditions.wrapper_parameters]
windows = [[4, 4], [2, 2]]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_a_grid_with_its_baselines(tmp_path: Path) -> None:
    study = read_study(write(tmp_path, FILE))
    conditions = study.conditions()
    assert list(conditions)[:2] == [UNPRUNED, NONE_KEPT] and conditions[UNPRUNED] is None
    assert [label for label in conditions if label.startswith("alpha")] == [
        f"alpha alpha={a} keep={k}" for a in (0.0, 0.5, 1.0) for k in (64, 0.25)
    ]
    wrapped = conditions["windowed(fastv keep=64) windows=2x2"]
    assert isinstance(wrapped, Windowed) and wrapped.windows == (2, 2) and wrapped.pruner == FastV(keep=64)
    assert (
        len(conditions) == 2 + 6 + 1 + 2 and study.models == ("tiny",) and study.tasks[0].families == ("exist", "text")
    )


def test_plain_values_give_the_same_study_again(tmp_path: Path) -> None:
    study = read_study(write(tmp_path, FILE))
    again = study_from(study.as_dict())
    assert again == study and again.fingerprint == study.fingerprint
    assert list(again.conditions()) == list(study.conditions())
    other = Study(tasks=(TaskSpec(name="shapes", n=13),), grids=study.grids)
    assert other.fingerprint != study.fingerprint


def test_a_study_without_baseline_says_why() -> None:
    task = (TaskSpec(name="shapes"),)
    grid = (Grid(method="dart", parameters={"keep": (64,)}),)
    assert list(Study(tasks=task, grids=grid, without_baseline="they are in another folder").conditions()) == [
        "dart keep=64"
    ]
    with pytest.raises(DartLabError, match="in words"):
        Study(tasks=task, grids=grid, without_baseline=" ")
    with pytest.raises(DartLabError, match="at least one condition"):
        Study(tasks=task, without_baseline="no need")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FILE.replace("keep = 64\n", "keep_radio = 0.1\n"), "Did you mean 'keep'"),
        (FILE.replace("batch_size", "batchsize"), "Did you mean 'batch_size'"),
        (FILE.replace("n = 12", "m = 12"), "unknown key 'm'"),
        (FILE.replace('method = "alpha"', 'method = "alhpa"'), "Did you mean 'alpha'"),
        (FILE.replace('"windowed"', '"window"'), "Did you mean 'windowed'"),
        (FILE.replace("windows =", "windos ="), "Did you mean 'windows'"),
        (FILE.replace('name = "shapes"', ""), "has no name"),
        (FILE.replace("batch_size = 4", "batch_size = 0"), "at least 1"),
        (FILE.replace("alpha = [0.0, 0.5, 1.0]", "alpha = [0.0, 0.0]"), "there twice"),
        (FILE.replace("[[conditions]]\ntext", "[[conditions]]\nmethod = 'dart'\ntext"), "either method or text"),
        (FILE.replace("[[tasks]]", "[tasks]"), r"\[\[tasks\]\]"),
        ("model = ", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DartLabError, match=words):
        read_study(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DartLabError, match="cannot be read"):
        read_study(tmp_path / "none.toml")
