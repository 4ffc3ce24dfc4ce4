"""Options that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("dart-lab", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("dart-lab")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden", type=Path, default=None, metavar="DIR",
        help="folder of golden cases; default: ../shared/golden beside the repository, else tests/data/golden",
    )
