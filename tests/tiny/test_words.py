"""The words of tiny: every question and answer of the world is known, and the tokenizer of the checkpoint agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import dart_lab.tiny
from dart_lab.tasks import load_task, questions
from dart_lab.tiny import words

CHECKPOINT = Path(dart_lab.tiny.__file__).parent / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_every_question_and_answer_is_made_of_known_words(tokenizer: Tokenizer) -> None:
    for sample in load_task("shapes", n=70, seed=4, questions_per_image=7):
        for text in (sample.question, *sample.choices):
            ids = words.encode(text)
            assert words.IDS[words.UNKNOWN] not in ids
            assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert words.decode(words.encode(sample.answer)) == sample.answer


@pytest.mark.parametrize("answer", [*questions.NUMBERS, *questions.CELL_NAMES])
def test_numbers_and_cells_are_two_tokens_that_join_again(tokenizer: Tokenizer, answer: str) -> None:
    ids = words.encode(answer)
    assert len(ids) == 2
    assert tokenizer.decode(ids) == words.decode(ids) == answer


def test_unknown_words_and_capitals(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Is there a Zebra?", add_special_tokens=False).ids == words.encode("is there a zebra?")
    assert words.encode("zebra") == [words.IDS[words.UNKNOWN]]


def test_the_image_token_is_one_token_anywhere(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("user : <image> is", add_special_tokens=False).ids
    assert ids == [words.IDS[word] for word in ("user", ":", words.IMAGE, "is")]
