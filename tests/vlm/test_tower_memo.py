"""A vision tower runs once for equal inputs, and never in place of a run with others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dart_lab.vlm import compat
from dart_lab.vlm.tower_memo import TowerMemo, memo_of
from tests.vlm.common import ONE, THREE, batch, small_llava
from tests.vlm.families.zoo import FAMILIES, VIDEOS, Zoo


def logits(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def own_attributes(model: Any) -> list[set[str]]:
    return [set(vars(tower)) for tower in compat.vision_towers(model)]


@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_every_family_gives_the_same_bits_from_one_run(kind: Zoo) -> None:
    model, inputs, other = kind.model("sdpa"), kind.batch("padded"), kind.batch("padded")
    plain, before = logits(model, inputs), own_attributes(model)
    other[kind.pixels] = -other[kind.pixels].flip(-1)  # other pixels, the same shape; what is empty stays so
    changed = logits(model, other)
    with TowerMemo(model) as memo:
        found = [logits(model, inputs)]
        first = memo.runs
        found += [logits(model, inputs) for _ in range(2)]
        assert memo.runs == first > 0
        assert torch.equal(logits(model, other), changed) and memo.runs > first
        assert torch.equal(logits(model, inputs), plain)
    assert all(torch.equal(one, plain) for one in found) and not torch.equal(changed, plain)
    assert own_attributes(model) == before


def test_inputs_and_features_that_change_in_place_are_not_mistaken() -> None:
    model, inputs = small_llava(), batch(ONE)
    plain = logits(model, inputs)

    def spoils(module: Any, args: Any, output: Any) -> None:
        for states in (output.last_hidden_state, *output.hidden_states):
            if states is not None:  # some releases keep the one state that is read
                states.zero_()
        output.pooler_output = None

    with TowerMemo(model) as memo:
        assert torch.equal(logits(model, inputs), plain)
        handle = model.model.vision_tower.register_forward_hook(spoils)
        logits(model, inputs)
        handle.remove()
        assert torch.equal(logits(model, inputs), plain) and memo.runs == 1
        inputs["pixel_values"].add_(1.0)
        moved = logits(model, inputs)
        assert memo.runs == 2
    assert torch.equal(logits(model, inputs), moved) and not torch.equal(moved, plain)


def test_other_arguments_run_again() -> None:
    model, inputs = small_llava(), batch(THREE)
    tower, pixels = model.model.vision_tower, inputs["pixel_values"]
    with TowerMemo(model) as memo, torch.no_grad():
        tower(pixels)
        tower(pixels, output_hidden_states=True)
        assert memo.runs == 2 and tower(pixels, output_hidden_states=True).hidden_states is not None
        tower(pixels.double().float())
        tower(pixels[:2])
        assert memo.runs == 3


def test_a_pause_remembers_nothing() -> None:
    model, inputs = small_llava(), batch(ONE)
    with TowerMemo(model) as memo:
        resume = memo.pause()
        for _ in range(2):
            logits(model, inputs)
        assert memo.runs == 0
        resume()
        logits(model, inputs)
        assert memo.runs == 1


def test_nothing_is_left_after_an_error_and_memos_nest() -> None:
    model, inputs = small_llava(), batch(ONE)
    tower = model.model.vision_tower
    plain, before = logits(model, inputs), own_attributes(model)
    with pytest.raises(RuntimeError, match="stop"), TowerMemo(model) as outer:
        with TowerMemo(model) as inner:
            logits(model, inputs)
            assert memo_of(tower) is inner and (outer.runs, inner.runs) == (1, 1)
        assert memo_of(tower) is outer
        assert torch.equal(logits(model, inputs), plain) and outer.runs == 1
        raise RuntimeError("stop")
    assert own_attributes(model) == before and memo_of(tower) is None
    assert torch.equal(logits(model, inputs), plain)
