"""Pictures come before the question: a method that does not ask it keeps the same, whatever the question."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.vlm.insert import prune
from tests.pruners.layouts import methods, parts
from tests.pruners.test_invariants import ASKS, excepted
from tests.vlm.common import IMAGE, THREE, batch, small_llava, words

DRAWS = ("random",)  # from the whole prompt, words included
BLIND = [
    name for name in methods()
    if name not in DRAWS and not any(excepted(ASKS, key) for key in parts() if key.partition("@")[0] == name)
]


def questions(count: int) -> list[dict[str, torch.Tensor]]:
    """The same pictures with other words behind them, as many."""
    found = []
    for seed in range(count):
        inputs, generator = batch(THREE), torch.Generator().manual_seed(seed)
        for ids in inputs["input_ids"]:
            after = int((ids == IMAGE).nonzero().max()) + 1
            ids[after:] = torch.tensor(words(generator, len(ids) - after))
        found.append(inputs)
    return found


@cache
def model() -> Any:
    return small_llava(vision_layers=3)


def kept(name: str, inputs: dict[str, torch.Tensor]) -> list[list[list[int]]]:
    """Stage by stage."""
    with torch.no_grad(), prune(model(), methods()[name]) as run:
        model()(**inputs)
    return [[decision.kept.tolist() for decision in sample.decisions] for sample in run.samples]


@pytest.mark.parametrize("name", BLIND)
def test_the_question_comes_too_late_for_what_does_not_ask_it(name: str) -> None:
    first, *others = [kept(name, inputs) for inputs in questions(3)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", ["dart", "fastv", "sparsevlm", "mustdrop"])
def test_other_methods_hear_it(name: str) -> None:
    first, *others = [kept(name, inputs) for inputs in questions(4)]
    assert any(other != first for other in others)


def test_a_method_that_needs_a_text_tower_says_so() -> None:
    with pytest.raises(DartLabError, match="text tower"):
        kept("cdpruner", batch(THREE))
