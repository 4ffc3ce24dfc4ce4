"""Nothing is left on the model: not after the block, not after an exception, not for other people's hooks."""

from __future__ import annotations

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from dart_lab.errors import DartLabError
from dart_lab.probes.attention_mass import AttentionMass
from dart_lab.pruners import DART, FastV, Random, UniformGrid, VisionZip
from dart_lab.vlm import compat
from dart_lab.vlm.insert import prune
from dart_lab.vlm.passes import Pass
from dart_lab.vlm.recording import record
from dart_lab.vlm.select import select
from dart_lab.vlm.tap import Captured, Tap
from tests.vlm.common import ONE, THREE, Uneven, batch, small_llava
from tests.vlm.stepping import decode
from tests.vlm.test_generate import generate, prompts

CYCLES = 1000
HOOKS = [name for name in vars(nn.Module()) if "hook" in name]


def snapshot(model: Any) -> dict[str, Any]:
    """Everything of a model that insertion could touch."""
    found: dict[str, Any] = {"functions": sorted(compat.attention_registry())}
    for name, module in model.named_modules():
        hooks = {kind: list(getattr(module, kind)) for kind in HOOKS if hasattr(getattr(module, kind), "keys")}
        found[name] = (type(module), sorted(vars(module)), id(getattr(module, "config", None)), module.training, hooks)
    found["config"] = model.config.to_dict()
    found["kernel"] = compat.backend_of(compat.text_model(model))
    return found


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def model() -> Any:
    """A model that has run before: transformers hangs hooks of its own in at the first run."""
    model = small_llava()
    generate(model, prompts(), do_sample=False)
    return model


def assert_as_before(model: Any, before: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    after = snapshot(model)
    for name in before | after:
        assert after.get(name) == before.get(name), name
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


class Boom(RuntimeError):
    pass


class BrokenRandom(Random):
    def reduce(self, *args: Any) -> Any:
        raise Boom


def fails_in_pruner(model: Any) -> None:
    with prune(model, BrokenRandom(keep=3)), torch.no_grad():
        model(**batch())


def fails_in_generate(model: Any) -> None:
    def explode(*_: Any, **__: Any) -> None:
        raise Boom

    hook = model.lm_head.register_forward_hook(explode)
    try:
        with prune(model, DART(keep=5)):
            generate(model, prompts())
    finally:
        hook.remove()


def fails_in_block(model: Any) -> None:
    with prune(model, FastV(keep=5, rerank=True)):
        generate(model, prompts())
        raise Boom


def fails_in_inner_block(model: Any) -> None:
    with prune(model, DART(keep=5)), prune(model, FastV(keep=5)):
        raise Boom


def fails_in_select(model: Any) -> None:
    select(model, batch(), [DART(keep=5), BrokenRandom(keep=3)])


def fails_on_entering(model: Any) -> None:
    try:
        with prune(model, DART(keep=5, layer=4)):
            pass
    except DartLabError as error:
        raise Boom from error


def fails_in_attach(model: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tap, "__enter__", lambda self: (_ for _ in ()).throw(Boom()))
        with prune(model, DART(keep=5)):
            pass


FAULTS = [
    fails_in_pruner, fails_in_generate, fails_in_block, fails_in_inner_block, fails_in_select, fails_on_entering,
    fails_in_attach,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_restored_after_an_exception(model: Any, fault: Any) -> None:
    before, tensors = snapshot(model), weights(model)
    with pytest.raises(Boom):
        fault(model)
    assert_as_before(model, before, tensors)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_restored_after_the_block(backend: str) -> None:
    model = small_llava(attention=backend)
    plain = generate(model, prompts(), do_sample=False)
    before, tensors = snapshot(model), weights(model)
    for pruner in (DART(keep=5), Uneven(), FastV(keep=5, rerank=True)):
        with prune(model, pruner):
            generate(model, prompts(), num_beams=2, do_sample=False)
            assert snapshot(model) != before
    select(model, batch(THREE), [DART(keep=5), Random(keep=3, layer=1)])
    assert_as_before(model, before, tensors)
    after = generate(model, prompts(), do_sample=False)
    assert torch.equal(torch.stack(plain.logits), torch.stack(after.logits))


def test_other_peoples_hooks_survive_and_fire(model: Any) -> None:
    fired: list[str] = []
    layer = model.model.language_model.layers[2]
    outside = layer.register_forward_hook(lambda *_: fired.append("outside"))
    with prune(model, DART(keep=5)), torch.no_grad():
        inside = layer.register_forward_pre_hook(lambda *_: fired.append("inside"))
        norm = model.model.language_model.norm.register_forward_hook(lambda *_: fired.append("norm"))
        model(**batch())
    assert fired == ["inside", "outside", "norm"]  # the norm once: a method that uses it does not call other's hooks
    with torch.no_grad():
        model(**batch())
    assert fired == ["inside", "outside", "norm"] * 2
    for handle in (outside, inside, norm):
        handle.remove()


def test_the_inner_block_takes_over_and_the_outer_one_returns(model: Any) -> None:
    inputs = batch(THREE)
    with prune(model, DART(keep=5)) as outer, torch.no_grad():
        first = model(**inputs).logits
        with prune(model, UniformGrid(keep=3)) as inner:
            model(**inputs)
        last = model(**inputs).logits
    assert torch.equal(first, last)
    assert outer.got == [5] * 6 and inner.got == [3] * 3


def test_taps_may_leave_in_any_order(model: Any) -> None:
    seen: list[str] = []
    layer = model.model.language_model.layers[1]
    before, tensors = snapshot(model), weights(model)
    first, second = (Tap({1: layer}, lambda _, __, who=who: seen.append(who)) for who in "ab")
    with torch.no_grad():
        first.__enter__()
        second.__enter__()
        model(**batch())
        first.__exit__()
        model(**batch())
        with prune(model, FastV(keep=5)) as run:
            second.__exit__()
            model(**batch())
    assert seen == ["a", "b", "b"] and run.got == [5]
    assert_as_before(model, before, tensors)


def test_four_models_in_four_threads() -> None:
    methods = [DART(keep=5), FastV(keep=4), Uneven(), Random(keep=3)]

    models = [small_llava(seed=number) for number in range(4)]

    def work(number: int) -> torch.Tensor:
        outs = []
        for _ in range(3):
            with prune(models[number], methods[number]):
                outs.append(torch.stack(decode(models[number], batch(THREE), 3).logits))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        return outs[0]

    alone = [work(number) for number in range(4)]
    functions = sorted(compat.attention_registry())
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(4)))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert sorted(compat.attention_registry()) == functions


def living() -> tuple[int, int]:
    gc.collect()
    objects = gc.get_objects()
    return sum(type(o) in (Pass, Captured) for o in objects), sum(type(o) is torch.Tensor for o in objects)


def blocks(model: Any, dice: random.Random) -> list[AbstractContextManager[Any]]:
    """One to three blocks to nest: methods, broken ones too, and probes, in any order."""
    pruners = [
        DART(keep=5, layer=1), FastV(keep=5, layer=1, rerank=True), Uneven(layer=1), VisionZip(keep=5),
        BrokenRandom(keep=3, layer=1),
    ]  # fmt: skip
    makers = [lambda: prune(model, dice.choice(pruners)), lambda: record(model, AttentionMass(layers=[1]))]
    return [dice.choice(makers)() for _ in range(dice.randint(1, 3))]


@pytest.mark.filterwarnings("ignore:.*nothing was pruned")  # an outer block that the inner one stood in for
def test_a_thousand_blocks_with_random_exceptions_leak_nothing() -> None:
    """Blocks nested in any order; the fault comes from the method, from within the block, or not at all."""
    model = small_llava(layers=2, hidden=8, vision_layers=1, heads=2)
    dice, inputs = random.Random(0), batch(ONE)
    with torch.no_grad():
        model(**inputs)
    before, tensors = snapshot(model), weights(model)
    counts, faults = [], 0
    for cycle in range(CYCLES):
        try:
            with ExitStack() as stack, torch.no_grad():
                for block in blocks(model, dice):
                    stack.enter_context(block)
                model(**inputs, use_cache=dice.random() < 0.5)
                if dice.random() < 0.3:
                    raise Boom
        except Boom:
            faults += 1
        if cycle + 1 in (CYCLES // 2, CYCLES):
            counts.append(living())
    assert CYCLES // 4 < faults < CYCLES * 3 // 4
    assert counts[0] == counts[1]
    assert counts[1][0] == 0
    assert_as_before(model, before, tensors)


def pruning(model: Any) -> AbstractContextManager[Any]:
    return prune(model, DART(keep=5))


def recording(model: Any) -> AbstractContextManager[Any]:
    return record(model, AttentionMass())


@pytest.mark.filterwarnings("ignore:.*nothing was pruned")
@pytest.mark.parametrize("inner", [pruning, recording], ids=lambda f: f.__name__)
@pytest.mark.parametrize("outer", [pruning, recording], ids=lambda f: f.__name__)
def test_nested_blocks_leave_no_trace_on_each_other(model: Any, outer: Any, inner: Any) -> None:
    """What each block notes is what it notes with the other one ended, and the model is as it was."""
    inputs = batch(THREE)
    before, tensors = snapshot(model), weights(model)
    with torch.no_grad():
        plain = model(**inputs).logits
        with outer(model) as alone:
            expected = model(**inputs).logits
        with outer(model) as noted:
            with inner(model):
                pass
            assert torch.equal(model(**inputs).logits, expected)
        assert torch.equal(model(**inputs).logits, plain)
    assert noted.table().equals(alone.table())
    assert_as_before(model, before, tensors)
