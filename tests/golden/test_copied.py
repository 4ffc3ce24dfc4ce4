"""The small cases that travel with the repository, so that parity is always checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.case import Case
from tests.golden.test_golden import COPIED, case_paths, runner


@pytest.mark.parametrize("path", case_paths(COPIED), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_copied(path: Path) -> None:
    case = Case(path)
    runner(case.record["method"])(case)


def test_recipes_rebuild_the_stored_inputs() -> None:
    from tests.golden.case import draw

    for path in case_paths(COPIED):
        case = Case(path)
        recipe = case.record["recipe"]
        if recipe and not case.record["derived_inputs"]:
            drawn = draw(recipe)
            for name, tensor in case.inputs.items():
                assert drawn[name].equal(tensor), f"{path.name}: {name}"
