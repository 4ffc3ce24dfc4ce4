"""The pages' own examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dart_lab.studies.plan import read_study

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_study_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(blocks("studies.md", "toml")[0])
    study = read_study(tmp_path / "study.toml")
    assert len(study.conditions()) == 2 + 6 + 1 + 2 and study.tasks[0].n == 200


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks("studies.md", "python"):
        exec(compile(block, "docs/studies.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "p_holm" in printed and "agreement" in printed
