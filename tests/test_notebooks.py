"""Every notebook runs from top to bottom, ends in a picture, and is committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
#: What a notebook must have printed on its way, by its name.
PRINTED = {
    "01_quickstart": "kept 64 of 576 visual tokens",
    "02_your_own_model": "again with all: yes green",
    "04_token_roles": "without dead: ",
    "05_alpha_tradeoff": "answers: 192",
    "03_your_own_pruner": "Unusual keeps the contract\ncareless: batch leak",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_ends_in_a_picture(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=place).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any("image/png" in output.get("data", {}) for output in code[-1].outputs)
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert PRINTED.get(path.stem, "") in printed
    assert not list(tmp_path.iterdir()), "a notebook leaves no files"
