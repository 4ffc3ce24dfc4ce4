"""The pages' own examples run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from dart_lab.errors import DartLabError
from dart_lab.roles.rolebook import load_rolebook
from dart_lab.studies.plan import read_study
from dart_lab.vlm.families import use_family

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_new_family_works_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("new_family.md", "python"):
        exec(compile(block, "docs/new_family.md", "exec", dont_inherit=True), names)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[5] [[") and second == "right"


def test_an_adapter_that_lacks_an_answer_is_refused() -> None:
    with pytest.raises(DartLabError, match="no tokens, pixel_rows, regions; see docs/new_family"):
        use_family(SimpleNamespace(), SimpleNamespace(name="", model_types=(), prompt="", whole=0, visual_mask=None))


def test_the_study_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(blocks("studies.md", "toml")[0])
    study = read_study(tmp_path / "study.toml")
    assert len(study.conditions()) == 2 + 6 + 1 + 2 and study.tasks[0].n == 200


@pytest.mark.parametrize(
    ("page", "printed"), [("studies.md", ("p_holm", "agreement")), ("roles.md", ("True",))], ids=["studies", "roles"]
)
def test_the_python_examples_run(page: str, printed: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = blocks(page, "python")
    assert found
    for block in found:
        exec(compile(block, f"docs/{page}", "exec"), {})
    out = capsys.readouterr().out
    assert all(words in out for words in printed)


def test_what_the_page_of_roles_says_of_mini_is_what_was_recorded() -> None:
    home = DOCS.parent
    table = pd.read_csv(home / "figures/mini/agreement.csv")
    of_mini = table[(table["role"] == "all") & (table["a"] == "mini.rolebook")].set_index("b")["kappa"]
    said = re.findall(r"κ = (0\.\d\d)", (DOCS / "roles.md").read_text(encoding="utf-8"))
    assert said == [f"{of_mini[book]:.2f}" for book in ("pool.rolebook", "half.rolebook", "seed.rolebook")]
    book = load_rolebook(home / "figures/mini/mini.rolebook")
    assert book.channels == (507,) and book.vit_cut is None and book.layers[0] == 12
    assert book.prevalence["vit-sink"]["value"] == 0
    said = re.findall(r"(\d\.\d) % of its visual tokens", (DOCS / "roles.md").read_text(encoding="utf-8"))
    assert said == [f"{100 * book.prevalence['llm-sink']['value']:.1f}"]
    usual, cut = re.findall(r"holds (0\.\d\d), so from (0\.\d\d)", book.evidence["why"]["llm-sink"])[0]
    assert f"holds {usual} of" in (text := (DOCS / "roles.md").read_text(encoding="utf-8")) and f"from {cut} on" in text
