"""Runs on other releases of transformers fail when a test fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import versions


@pytest.mark.parametrize(
    ("content", "code"),
    [("def test_it(): pass", 0), ("def test_it(): assert False", 1), ("", 1)],
    ids=["passes", "fails", "is not there"],
)
def test_the_short_list_fails_when_a_test_does(
    content: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "test_listed.py"
    listed.write_text(content)
    monkeypatch.setattr(versions, "environment", lambda _: Path(sys.executable))
    monkeypatch.setattr(versions, "SHORT", {"what it shows": (f"{listed}::test_it",)})
    assert versions.main(["4.57.6", "--short", "--", "-p", "no:cacheprovider"]) == code
    assert capfd.readouterr().out.splitlines()[-1] == f"{'failed' if code else 'passed'}: 4.57.6"
