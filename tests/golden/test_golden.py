"""Every golden case of a folder, run through the method that it belongs to.

    pytest tests/golden --golden DIR

A case is dispatched on the `method` field of its record; a new method is one more line in RUNNERS.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.golden.case import Case

RUNNERS = {  # method → module in this folder with `run(case)`
    "dart": "dart",
    "epic_dart": "dart",
    "lightcompress_dart": "dart",
    "fastv": "fastv",
    "epic_fastv": "fastv",
    "epic_random": "epic_random",
    "divprune": "divprune",
    "lightcompress_divprune": "divprune",
    "fastervlm": "fastervlm",
    "vispruner": "fastervlm",
    "visionzip": "visionzip",
    "ficoco_l": "ficoco",
    "ficoco_v": "ficoco",
    "hired": "hired",
    "tome": "tome",
    "sparsevlm": "sparsevlm",
    "mustdrop": "mustdrop",
    "e2e_pdrop": "e2e_stages",
    "e2e_sparsevlm": "e2e_stages",
    "e2e_dart": "e2e",
    "e2e_fastv": "e2e",
    "e2e_dart_qwen25vl": "e2e_qwen",
    "embedlens": "embedlens",
}

REPOSITORY = Path(__file__).resolve().parents[2]
BESIDE = REPOSITORY.parent / "shared" / "golden"
COPIED = REPOSITORY / "tests" / "data" / "golden"


def case_paths(root: Path) -> list[Path]:
    """Records of cases under `root`, sorted: every JSON file that names a method and a case."""
    if not root.is_dir():
        raise pytest.UsageError(f"--golden {root}: there is no such folder")
    paths = []
    for path in sorted(root.rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and {"method", "case"} <= record.keys():
            paths.append(path)
    return paths


def runner(method: str) -> Callable[[Case], None]:
    if method not in RUNNERS:
        pytest.skip(f"no method for the golden cases of {method!r} yet, see tests/SKIPS.md")
    return import_module(f"tests.golden.{RUNNERS[method]}").run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    root = metafunc.config.getoption("--golden")
    if root is not None:
        root = Path(metafunc.config.invocation_params.dir, root)
    paths = case_paths(root or (BESIDE if BESIDE.is_dir() else COPIED))
    metafunc.parametrize("path", paths, ids=[f"{path.parent.name}/{path.stem}" for path in paths])


def test_golden(path: Path) -> None:
    case = Case(path)
    runner(case.record["method"])(case)
