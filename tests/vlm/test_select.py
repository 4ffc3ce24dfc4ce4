"""`select` says what `prune` would keep, and runs nothing that it does not need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dart_lab.pruners import DART, FastV, Pruner, Random
from dart_lab.vlm.insert import prune
from dart_lab.vlm.select import select
from tests.vlm.common import IMAGE, THREE, all_methods, batch, small_llava


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_equal_to_pruning_one_by_one(backend: str) -> None:
    model, inputs = small_llava(attention=backend), batch(THREE)
    pruners = [*all_methods(layer=2).values(), *all_methods(layer=1).values(), DART(keep=3, layer=3)]
    runs = select(model, inputs, pruners)
    for pruner, run in zip(pruners, runs, strict=True):
        with prune(model, pruner) as alone, torch.no_grad():
            model(**inputs)
        assert run.table().equals(alone.table()), pruner


def test_layers_behind_the_deepest_stage_do_not_run() -> None:
    model, inputs, ran = small_llava(layers=6), batch(THREE), []
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(model.model.language_model.layers)
    ]
    towers = model.model.vision_tower.register_forward_pre_hook(lambda *_: ran.append(-1))
    select(model, inputs, [DART(keep=5, layer=1), FastV(keep=5, layer=3), Random(keep=2, layer=3)])
    assert ran == [-1, 0, 1, 2]
    for hook in (*hooks, towers):
        hook.remove()


@pytest.mark.parametrize("pruner", [DART(keep=5), Random(keep=5)], ids=lambda p: p.name)
def test_inside_a_block_it_sees_the_whole_sequence(pruner: Pruner) -> None:
    model, inputs = small_llava(), batch(THREE)
    want = select(model, inputs, [pruner])[0]
    with prune(model, FastV(keep=2, layer=1)) as outer, torch.no_grad():
        model(**inputs)
        inside = select(model, inputs, [pruner])[0]
        model(**inputs)
    assert [k.tolist() for k in inside.kept] == [k.tolist() for k in want.kept]
    assert outer.got == [2] * 6


def test_embeddings_with_a_mask() -> None:
    model, inputs = small_llava(), batch()
    seen: list[Any] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    by_ids = select(model, inputs, [DART(keep=5)])[0]
    hook.remove()
    given = {"inputs_embeds": seen[0], "attention_mask": inputs["attention_mask"]}
    by_mask = select(model, given, [DART(keep=5)], visual=inputs["input_ids"] == IMAGE)[0]
    assert by_mask.kept[0].tolist() == by_ids.kept[0].tolist()
