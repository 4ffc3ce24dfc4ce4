"""Compiled models prune as plain ones do, before and after they ran without; what cannot be compiled fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from transformers import CompileConfig

from dart_lab.errors import DartLabWarning
from dart_lab.pruners import DART, UniformGrid
from dart_lab.vlm.insert import prune
from tests.vlm.common import NEVER, THREE, batch, small_llava

PRUNER = UniformGrid(keep=5, layer=1)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def two_layers() -> Any:
    return small_llava(layers=2, vision_layers=1)


def by_layer(model: Any, **options: Any) -> Any:
    for layer in model.model.language_model.layers:
        layer.compile(backend="eager", **options)
    return model


@torch.no_grad()
def test_compiled_layers_are_pruned_inside_the_block_and_only_there() -> None:
    inputs, model, ours = batch(THREE), two_layers(), by_layer(two_layers())
    plain = model(**inputs).logits
    assert torch.equal(ours(**inputs).logits, plain)
    with prune(model, PRUNER):
        pruned = model(**inputs).logits
    assert not torch.equal(plain, pruned)
    with prune(ours, PRUNER) as run:
        assert torch.equal(ours(**inputs).logits, pruned)
    assert torch.equal(ours(**inputs).logits, plain)
    assert run.got == [5, 5, 5]


@torch.no_grad()
def test_what_torch_compile_returns_is_pruned() -> None:
    inputs, model = batch(THREE), two_layers()
    with prune(model, PRUNER):
        pruned = model(**inputs).logits
    ours = torch.compile(two_layers(), backend="eager")
    with torch.compiler.set_stance("force_eager"), prune(ours, PRUNER) as run:  # tracing all of it takes ten seconds
        assert torch.equal(ours(**inputs).logits, pruned)
    assert run.got == [5, 5, 5]


def test_generate_that_compiles_its_decode_steps() -> None:
    inputs = batch(THREE)
    inputs.pop("position_ids")
    config = CompileConfig(backend="eager", mode=None, fullgraph=False)
    config._compile_all_devices = True  # transformers compiles by itself on accelerators alone
    options = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": NEVER, "cache_implementation": "static"}
    tokens = []
    for choice in ({"compile_config": config}, {"disable_compile": True}):
        model = two_layers()
        with prune(model, DART(keep=5, layer=1)) as run:
            tokens.append(model.generate(**inputs, **options, **choice))
        assert hasattr(model, "_compiled_call") == ("compile_config" in choice)
        assert run.got == [5, 5, 5]
    assert torch.equal(*tokens)


@torch.no_grad()
def test_layers_that_must_be_one_graph_fail_and_do_not_run_unpruned() -> None:
    inputs, model = batch(THREE), by_layer(two_layers(), fullgraph=True)
    model(**inputs)
    with pytest.warns(DartLabWarning, match="nothing was pruned"), prune(model, PRUNER), pytest.raises(Unsupported):
        model(**inputs)
