"""Matched controls: as many, from where they may come, row by row, and even over seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.roles.controls import matched_control

masks = st.lists(st.booleans(), min_size=12, max_size=12).map(np.array)


@given(masks, masks, st.integers(0, 9))
def test_as_many_as_are_marked_and_only_from_the_pool(marked: np.ndarray, among: np.ndarray, seed: int) -> None:
    row = np.arange(12) // 4
    for match in ("size", "rows"):
        found = matched_control(marked, among=among, match=match, row=row, seed=seed)  # type: ignore[arg-type]
        assert found.sum() == min(marked.sum(), among.sum()) and not (found & ~among).any()
        again = matched_control(marked, among=among, match=match, row=row, seed=seed)  # type: ignore[arg-type]
        assert np.array_equal(found, again)


@given(masks, st.integers(0, 9))
def test_rows_are_matched_where_the_pool_is_everything(marked: np.ndarray, seed: int) -> None:
    row = np.arange(12) // 4
    found = matched_control(marked, match="rows", row=row, seed=seed)
    assert np.array_equal(np.bincount(row[found], minlength=3), np.bincount(row[marked], minlength=3))


def test_every_token_comes_up_alike() -> None:
    marked = np.arange(10) < 3
    counts = sum(matched_control(marked, seed=seed).astype(int) for seed in range(2000))
    assert abs(counts / 2000 - 0.3).max() < 0.05


def test_errors() -> None:
    with pytest.raises(DartLabError, match="match='row'"):
        matched_control(np.ones(3, bool), match="row")  # type: ignore[arg-type]
    with pytest.raises(DartLabError, match=r"row=tokens\.row"):
        matched_control(np.ones(3, bool), match="rows")
