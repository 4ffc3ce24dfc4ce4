"""How answers are scored: exact match after normalisation, for every family."""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass

from dart_lab.errors import DartLabError

_DROPPED = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Score:
    """Number of questions and of right answers; ``accuracy`` is their ratio, 0 to 1."""

    n: int
    right: int

    @property
    def accuracy(self) -> float:
        return self.right / self.n


def normalise_answer(text: str) -> str:
    """Lower case, without punctuation and with single blanks.

    >>> normalise_answer(" Red  circle. ")
    'red circle'
    """
    return " ".join(text.lower().translate(_DROPPED).split())


def is_right(given: str, answer: str) -> bool:
    """Whether a given answer equals the right one after normalisation.

    >>> is_right("Yes.", "yes")
    True
    """
    return normalise_answer(given) == normalise_answer(answer)


def score_answers(given: Iterable[str], answers: Iterable[str], families: Iterable[str]) -> dict[str, Score]:
    """Score of every family, in order of appearance.

    Raises:
        DartLabError: the three differ in length.

    >>> score_answers(["yes", "no"], ["yes", "yes"], ["exist", "exist"])["exist"].accuracy
    0.5
    """
    given, answers, families = list(given), list(answers), list(families)
    if not len(given) == len(answers) == len(families):
        raise DartLabError(
            f"{len(given)} given answers, {len(answers)} right ones, {len(families)} families: lengths differ"
        )
    scores: dict[str, Score] = {}
    for one, answer, family in zip(given, answers, families, strict=True):
        before = scores.get(family, Score(0, 0))
        scores[family] = Score(before.n + 1, before.right + is_right(one, answer))
    return scores
