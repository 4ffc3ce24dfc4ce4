"""How one answer is scored: a number from 0 to 1 for each of the benchmarks' rules."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dart_lab.errors import DartLabError
from dart_lab.tasks.scoring import normalise_answer

_ARTICLES = frozenset({"a", "an", "the"})
_DIGITS = {word: str(n) for n, word in enumerate("zero one two three four five six seven eight nine ten".split())}
_NEGATIONS = frozenset({"No", "not", "no"})
#: How many of the other annotators must agree for full marks (VQAv2, TextVQA).
_AGREEING = 3


def yes_or_no(text: str) -> str:
    """POPE's reading of a free answer: "no" if the first sentence has the word No, not or no, else "yes".

    >>> yes_or_no("There is not a dog, no."), yes_or_no("Yes, a dog. No cat.")
    ('no', 'yes')
    """
    words = text.split(".", 1)[0].replace(",", "").split(" ")
    return "no" if _NEGATIONS & set(words) else "yes"


def vqa_words(text: str) -> str:
    """An answer as VQA compares it: lower case, no punctuation, no articles, number words up to ten as digits.

    The official evaluation also mends English contractions that lack their apostrophe; this one does not.

    >>> vqa_words("The two  dogs.")
    '2 dogs'
    """
    words = normalise_answer(text).split()
    return " ".join(_DIGITS.get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(given: str, answers: Sequence[str]) -> float:
    """Soft accuracy against several annotators: each left out in turn, min(1, agreeing others / 3), averaged.

    Raises:
        DartLabError: no answers.

    >>> round(vqa_accuracy("red", ["red"] * 2 + ["blue"] * 8), 3)
    0.6
    """
    if not answers:
        raise DartLabError("vqa_accuracy needs the annotators' answers, got none")
    same = [vqa_words(given) == vqa_words(answer) for answer in answers]
    if len(same) == 1:
        return float(same[0])
    needed = min(_AGREEING, len(same) - 1)
    return sum(min(1.0, (sum(same) - one) / needed) for one in same) / len(same)


def anls(given: str, answers: Sequence[str], *, cut: float = 0.5) -> float:
    """Average normalised Levenshtein similarity of one answer: the best of 1 − distance / length, 0 from `cut` on.

    Args:
        given: the model's answer.
        answers: the accepted ones.
        cut: normalised distance from which an answer counts nothing. Default 0.5 (Biten et al. 2019).

    Raises:
        DartLabError: no answers.

    >>> anls("Hello World", ["hello word"]) == 1 - 1 / 11
    True
    """
    if not answers:
        raise DartLabError("anls needs at least one accepted answer, got none")
    return max(_similarity(given.strip().lower(), answer.strip().lower(), cut) for answer in answers)


def _similarity(a: str, b: str, cut: float) -> float:
    length = max(len(a), len(b))
    distance = _levenshtein(a, b) / length if length else 0.0
    return 1 - distance if distance < cut else 0.0


def _levenshtein(a: str, b: str) -> int:
    """Insertions, deletions and replacements that turn one text into the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def read_box(text: str) -> tuple[float, float, float, float] | None:
    """The first four numbers of an answer as x0, y0, x1, y1; None if there are fewer.

    >>> read_box("It is at [0.1, 0.2, 0.5, 0.8].")
    (0.1, 0.2, 0.5, 0.8)
    """
    numbers = [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", text)[:4]]
    return (numbers[0], numbers[1], numbers[2], numbers[3]) if len(numbers) == 4 else None


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes x0, y0, x1, y1 in the same unit; an empty or turned-over box gives 0.

    >>> iou((0, 0, 2, 2), (1, 0, 3, 2)) == 1 / 3
    True
    """
    for box in (a, b):
        if len(box) != 4:
            raise DartLabError(f"a box has 4 numbers x0, y0, x1, y1; got {len(box)}")
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    whole = sum(max(x1 - x0, 0.0) * max(y1 - y0, 0.0) for x0, y0, x1, y1 in (a, b)) - both
    return both / whole if whole > 0 else 0.0
