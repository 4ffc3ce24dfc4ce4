"""Rules for single answers, against values worked out by hand and plain definitions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.studies.answers import anls, iou, read_box, vqa_accuracy, vqa_words, yes_or_no

letters = st.text("abc", max_size=6)
boxes = st.tuples(*[st.integers(0, 6)] * 4).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes", "yes"), ("no", "no"), ("No, there is none", "no"), ("It is not there", "no"), ("NO", "yes"),
        ("Yes. No doubt", "yes"), ("nothing", "yes"), ("", "yes"), ("Well,no", "yes"), ("none of it, no", "no"),
    ],
)  # fmt: skip
def test_popes_reading(text: str, expected: str) -> None:
    assert yes_or_no(text) == expected


@pytest.mark.parametrize(
    ("same", "of", "expected"),
    [(10, 10, 1.0), (4, 10, 1.0), (3, 10, (7 * 1 + 3 * 2 / 3) / 10), (1, 10, 9 / 30), (0, 10, 0)],
)
def test_soft_accuracy_counts_the_annotators_left_over(same: int, of: int, expected: float) -> None:
    assert vqa_accuracy("A Dog", ["dog"] * same + ["cat"] * (of - same)) == pytest.approx(expected)


def test_soft_accuracy_of_one_answer_is_exact_match_and_none_is_an_error() -> None:
    assert vqa_accuracy("two", ["2"]) == 1.0 and vqa_accuracy("two", ["3"]) == 0.0
    with pytest.raises(DartLabError, match="got none"):
        vqa_accuracy("two", [])
    assert vqa_words("An apple, the  ten!") == "apple 10"


def edits(a: str, b: str) -> int:
    """The recursive definition."""
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return edits(a[1:], b[1:])
    return 1 + min(edits(a[1:], b), edits(a, b[1:]), edits(a[1:], b[1:]))


@given(letters, letters)
def test_anls_is_one_minus_the_share_of_edits_and_nothing_from_one_half_on(a: str, b: str) -> None:
    share = edits(a, b) / max(len(a), len(b), 1)
    assert anls(a, [b]) == pytest.approx(1 - share if share < 0.5 else 0.0)


def test_anls_takes_the_best_answer() -> None:
    assert anls("abcd", ["zzzz", "abcx"]) == 0.75
    with pytest.raises(DartLabError, match="got none"):
        anls("abcd", [])


@given(boxes, boxes)
def test_iou_counts_unit_squares(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    def squares(box: tuple[int, ...]) -> set[tuple[int, int]]:
        return set(itertools.product(range(box[0], box[2]), range(box[1], box[3])))

    either = squares(a) | squares(b)
    expected = len(squares(a) & squares(b)) / len(either) if either else 0.0
    assert iou(a, b) == pytest.approx(expected)
    assert iou(a, b) == iou(b, a)


def test_boxes_are_read_from_free_text() -> None:
    assert read_box("from (1, -2) to 3.5,4 and 9") == (1.0, -2.0, 3.5, 4.0)
    assert read_box("somewhere at 3") is None
    with pytest.raises(DartLabError, match="got 3"):
        iou((0, 0, 1), (0, 0, 1, 1))
