"""Roles as signals, and removal: against masks given by hand, hidden keys, and states replaced by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, FastV, Protect, Remove, Schedule
from dart_lab.pruners.signals import Signals
from dart_lab.vlm.insert import prune
from tests.vlm.common import IMAGE, ONE, THREE, TOKENS, batch, compare_with_mask, small_llava
from tests.vlm.stepping import decode

LAYER = 2


def roles_for(images: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [{"dead": rng.random(TOKENS * count) < 0.4} for count in images]


def padded(roles: list[dict[str, np.ndarray]]) -> Tensor:
    width = max(len(one["dead"]) for one in roles)
    return torch.stack([torch.from_numpy(np.pad(one["dead"], (0, width - len(one["dead"])))) for one in roles])


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_a_role_is_the_same_as_its_mask(images: tuple[int, ...]) -> None:
    model, inputs, roles = small_llava(), batch(images), roles_for(images)
    for method in (lambda **x: Protect(FastV(keep=0.5), **x), lambda **x: Protect(DART(keep=0.6), **x),
                   lambda **x: Remove(**x), lambda **x: Remove(where="input", **x)):  # fmt: skip
        with prune(model, method(role="dead"), roles=roles) as by_role, torch.no_grad():
            first = model(**inputs).logits
        with prune(model, method(mask=padded(roles))) as by_mask, torch.no_grad():
            second = model(**inputs).logits
        assert torch.equal(first, second)
        assert all(np.array_equal(a, b) for a, b in zip(by_role.kept, by_mask.kept, strict=True))


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_dropping_a_role_equals_hiding_it(images: tuple[int, ...], backend: str) -> None:
    method = Remove(mask=padded(roles_for(images)), layer=LAYER)
    worst, run, _ = compare_with_mask(small_llava(attention=backend), batch(images), method)
    assert worst < 1e-5 and all(0 < len(kept) < TOKENS * count for kept, count in zip(run.kept, images, strict=True))


@pytest.mark.parametrize("how", ["mean", "group-mean", "zero"])
@pytest.mark.parametrize("where", ["layer", "input"])
def test_replaced_states_are_those_put_in_by_hand(how: Any, where: Any) -> None:
    model, inputs, roles = small_llava(), batch(THREE), roles_for(THREE)
    with prune(model, Remove(role="dead", how=how, where=where, layer=LAYER), roles=roles) as run:
        ours = decode(model, inputs, 4)
    assert run.got == [TOKENS * count for count in THREE]

    def by_hand(module: Any, args: Any, kwargs: Any) -> Any:
        states = (args[0] if args else kwargs["hidden_states"]).clone()
        if states.shape[1] == 1:
            return None
        for row, one in enumerate(roles):
            place = torch.where(inputs["input_ids"][row] == IMAGE)[0]
            marked = place[torch.from_numpy(one["dead"])]
            source = {"mean": place, "group-mean": marked}.get(how)
            states[row, marked] = 0.0 if source is None else states[row, source].mean(dim=0)
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    layer = model.model.language_model.layers[LAYER if where == "layer" else 0]
    handle = layer.register_forward_pre_hook(by_hand, with_kwargs=True)
    hand = decode(model, inputs, 4, forced=ours.tokens)
    handle.remove()
    for mine, theirs in zip(ours.logits, hand.logits, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_roles_follow_tokens_through_stages_and_beams() -> None:
    model, inputs, roles = small_llava(), batch(THREE), roles_for(THREE)
    method = Schedule({1: Remove(role="dead"), 3: Protect(FastV(keep=0.3), role="dead")})
    with prune(model, method, roles=roles) as run:
        model.generate(**inputs, max_new_tokens=3, num_beams=2, do_sample=False)
    for kept, one in zip(run.kept, roles, strict=True):
        assert not one["dead"][kept].any()


def test_an_empty_role_changes_nothing() -> None:
    model, inputs = small_llava(), batch(ONE)
    with torch.no_grad():
        plain = model(**inputs).logits
        for how in ("drop", "mean", "group-mean", "zero"):
            method = Remove(mask=torch.zeros(TOKENS, dtype=torch.bool), how=how)
            with prune(model, method):
                assert torch.allclose(model(**inputs).logits, plain, atol=1e-6)


def test_errors_say_what_is_missing() -> None:
    model, inputs = small_llava(), batch((1, 1))
    nothing = {"dead": np.zeros(TOKENS, bool)}
    for given, message in (
        ([nothing], "roles are given for 1 samples"),
        (nothing, "one mapping a sample"),
        ([{"dead": np.zeros(3, bool)}] * 2, r"shape \(3,\)"),
        ([{"alive": np.zeros(TOKENS, bool)}] * 2, "no signal 'role:dead'"),
    ):
        with pytest.raises(DartLabError, match=message), prune(model, Remove(role="dead"), roles=given):  # type: ignore[arg-type]
            model(**inputs)
    with pytest.raises(DartLabError, match="leave keep out"):
        Remove(mask=torch.ones(3, dtype=torch.bool), keep=4)
    with pytest.raises(DartLabError, match="how='hide'"):
        Remove(role="dead", how="hide")  # type: ignore[arg-type]
    with pytest.raises(DartLabError, match="exactly one of mask, role"):
        Remove()
    with pytest.raises(DartLabError, match=r"give \(4,\)"):
        Remove(mask=torch.ones(5, dtype=torch.bool))(Signals.of(visual=torch.arange(4)[None]))
