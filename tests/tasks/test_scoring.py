"""Scores: exact match after normalisation, counted for every family."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.tasks import is_right, normalise_answer, score_answers


@given(st.text(max_size=20))
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalise_answer(normalise_answer(text)) == normalise_answer(text)


@given(st.text(alphabet="abc 12", min_size=1, max_size=20))
def test_case_blanks_and_full_stops_do_not_matter(text: str) -> None:
    assert is_right(f"  {text.upper()} .", text)


def test_planted_scores() -> None:
    scores = score_answers(["yes", "No.", "3", "4"], ["yes", "no", "3", "3"], ["exist", "exist", "count", "count"])
    assert {name: (score.n, score.right, score.accuracy) for name, score in scores.items()} == {
        "exist": (2, 2, 1.0),
        "count": (2, 1, 0.5),
    }
    with pytest.raises(DartLabError, match="2 given answers, 1 right"):
        score_answers(["a", "b"], ["a"], ["x"])
