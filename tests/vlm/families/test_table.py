"""docs/families.md: every cell has a test behind it, every test its cell, every adapter its row."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dart_lab.vlm.families import FAMILIES, family_of
from dart_lab.vlm.families.minicpm import MINICPM
from tests.families_table import FAILED, NONE
from tests.vlm.families import test_minicpm, zoo

ROOT = Path(__file__).parents[3]


def page() -> str:
    return (ROOT / "docs" / "families.md").read_text(encoding="utf-8")


def shape(page: str) -> str:
    """The page's tables with a mark in place of every outcome."""
    return re.sub(r"(?<=\| )(✓|✗|refused)( \d+)?(?= \|)", "x", page[: page.index("## Reasons")])


def test_the_page_has_the_cells_of_the_tests_and_no_others() -> None:
    command = [sys.executable, "-m", "tests.families_table", "--cells"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8")
    command_line = "python -m tests.families_table > docs/families.md"
    assert shape(done.stdout).rstrip() == shape(page()).rstrip(), f"out of date: run {command_line}"


def test_nothing_on_the_page_failed() -> None:
    assert FAILED not in page() and NONE in page()


def test_every_adapter_has_a_model_on_the_page() -> None:
    models = [*zoo.FAMILIES, *zoo.VIDEOS]
    known = {family_of(kind.model("sdpa")).name for kind in models}
    assert known | {MINICPM.name} == {family.name for family in FAMILIES}, "MiniCPM-V has a stand-in of its own"
    assert all(f"\n| {kind} | " in page() for kind in [*models, test_minicpm.KIND])
