"""Sharing a prefix and the run of the tower in other families: positions of three rows, deepstack, tiles, frames."""

from __future__ import annotations

import pytest
import torch

from dart_lab.probes.attention_mass import AttentionMass
from dart_lab.pruners import DART, DivPrune, FastV, Random
from dart_lab.studies.branch import branch
from dart_lab.vlm import compat
from dart_lab.vlm.insert import prune
from dart_lab.vlm.recording import record
from tests.vlm.families.qwen_models import CLASSES, qwen_batch, qwen_model
from tests.vlm.families.zoo import FAMILIES, VIDEOS, Zoo

PROMPTS = [[[(2, 3)]], [[(2, 3)], [(3, 2), (1, 4)]]]


@pytest.mark.parametrize("prompts", PROMPTS, ids=["one", "padded"])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_answers_as_alone(kind: str, prompts: list[list[tuple[int, int]]]) -> None:
    model, inputs = qwen_model(kind), qwen_batch(prompts)
    model.generation_config.eos_token_id = None
    pruners = [None, DART(keep=3, layer=2), FastV(keep=3, layer=2), FastV(keep=2, layer=3), Random(keep=0.5, layer=1)]
    shared = branch(model, inputs, pruners, max_new_tokens=5, logits=True)
    alone = branch(model, inputs, pruners, max_new_tokens=5, logits=True, share=False)
    for one, other in zip(shared, alone, strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=1e-5, rtol=0)
        assert torch.equal(one.tokens, other.tokens)
        assert [kept.tolist() for kept in one.run.kept] == [kept.tolist() for kept in other.run.kept]
    assert [one.shared for one in shared] == [True] * 4 + [kind != "qwen3_vl"]  # which adds features behind 0 and 1


@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_methods_in_front_answer_as_alone_in_every_family(kind: Zoo) -> None:
    model, inputs, runs = kind.model("sdpa"), kind.batch("padded"), list[int]()
    pruners = [None, DART(keep=5), DivPrune(keep=5), FastV(keep=5, rerank=True)]
    first = [compat.vision_blocks(tower)[0] for tower in compat.vision_towers(model)]
    handles = [block.register_forward_hook(lambda *_: runs.append(1)) for block in first]
    try:
        shared = branch(model, inputs, pruners, max_new_tokens=3, logits=True)
        once = len(runs)
        alone = branch(model, inputs, pruners, max_new_tokens=3, logits=True, share=False)
    finally:
        for handle in handles:
            handle.remove()
    assert len(runs) - once == len(pruners) * once
    for one, other in zip(shared, alone, strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=1e-5, rtol=0)
        assert [kept.tolist() for kept in one.run.kept] == [kept.tolist() for kept in other.run.kept]
        assert one.encoded_once and not other.encoded_once


@pytest.mark.parametrize("kind", CLASSES)
def test_masses_add_up_and_change_nothing(kind: str) -> None:
    model, inputs = qwen_model(kind), qwen_batch(PROMPTS[1])
    with torch.no_grad(), prune(model, DART(keep=3, layer=2)):
        plain = model(**inputs).logits
    with torch.no_grad(), record(model, AttentionMass()) as trace, prune(model, DART(keep=3, layer=2)):
        probed = model(**inputs).logits
    assert torch.equal(plain, probed)
    sums = trace.table(heads=True).groupby(["sample", "layer", "head", "query"])["mass"].sum()
    assert (sums - 1).abs().max() < 1e-5
