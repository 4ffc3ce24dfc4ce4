"""A method that keeps all of them, at any stage, leaves the model as it is, to the last bit, in every decode step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from dart_lab.vlm.insert import prune
from tests.pruners.layouts import parts
from tests.pruners.test_invariants import EXCEPT, excepted
from tests.vlm.common import THREE, batch, small_llava
from tests.vlm.stepping import Steps, decode

NEEDS_TEXT_TOWER = ("cdpruner",)  # see test_stage_question
STAGES = [
    key for key, part in parts().items()
    if part.keep is not None and not excepted(EXCEPT["keeping all"], key) and not key.startswith(NEEDS_TEXT_TOWER)
]


@cache
def untouched(backend: str) -> tuple[Any, Steps]:
    """A model, and what it says by itself."""
    model = small_llava(vision_layers=3, attention=backend)
    return model, decode(model, batch(THREE), 3)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("key", STAGES)
def test_keeping_all_in_any_stage_is_the_model_itself(key: str, backend: str) -> None:
    (model, plain), inputs = untouched(backend), batch(THREE)
    with prune(model, replace(parts()[key], keep=1.0)) as run:
        steps = decode(model, inputs, 3)
    assert run.got == [len(tokens) for tokens in run.layout]
    assert torch.equal(steps.prompt, plain.prompt)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(steps.logits, plain.logits, strict=True))
