"""Dropping tokens at layer K equals masking the same columns from layer K on: every method, backend and batch."""

from __future__ import annotations

import pytest
import torch

from dart_lab.pruners import DART, FastV, KeepAll, NoneKept, Pruner, UniformGrid
from dart_lab.vlm.insert import prune
from tests.vlm.common import (
    ONE,
    THREE,
    TOKENS,
    Uneven,
    all_methods,
    batch,
    compare_with_mask,
    in_float64,
    small_llava,
)
from tests.vlm.stepping import decode

METHODS = all_methods()


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", METHODS)
def test_dropping_equals_masking(name: str, backend: str, images: tuple[int, ...]) -> None:
    model, inputs, pruner = small_llava(attention=backend), batch(images), METHODS[name]
    worst, run, steps = compare_with_mask(model, inputs, pruner)
    assert worst <= 1e-5
    assert run.got == [len(kept) for kept in run.kept] and len(run.got) == len(images)
    check_cache_lengths(steps.lengths, inputs["input_ids"].shape[1], images, run.got, pruner.layer)


def check_cache_lengths(
    lengths: list[list[int]], prompt: int, images: tuple[int, ...], got: list[int], layer: int
) -> None:
    """Full below K; from K on as short as the row that keeps most allows."""
    text = [prompt_text(images, row) for row in range(len(images))]
    short = max(words + kept for words, kept in zip(text, got, strict=True))
    if got == [TOKENS * count for count in images]:
        short = prompt  # nothing was dropped, so padding stays too
    for step, held in enumerate(lengths):
        assert held == [prompt + step] * layer + [short + step] * (len(held) - layer)


def prompt_text(images: tuple[int, ...], row: int) -> int:
    """Positions of a row that are no visual tokens, padding included: padding is text to the cache."""
    ids = batch(images)["input_ids"][row]
    return len(ids) - TOKENS * images[row]


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_other_layers_and_grouped_queries(layer: int, kv_heads: int) -> None:
    model = small_llava(kv_heads=kv_heads)
    for pruner in (DART(keep=5, layer=layer), FastV(keep=3, layer=layer), Uneven(layer=layer)):
        worst, _, _ = compare_with_mask(model, batch(THREE), pruner, steps=4)
        assert worst <= 1e-5, pruner


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("pruner", [DART(keep=5), FastV(keep=3), Uneven(), NoneKept()], ids=lambda p: p.name)
def test_in_float64_to_1e_10(pruner: Pruner, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = in_float64(small_llava(attention=backend), monkeypatch), batch(THREE)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    worst, _, _ = compare_with_mask(model, inputs, pruner)
    assert worst <= 1e-10


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("pruner", [KeepAll(), UniformGrid(keep=1.0), FastV(keep=1.0)], ids=lambda p: p.name)
def test_keeping_all_is_bit_identical(pruner: Pruner, backend: str) -> None:
    model, inputs = small_llava(attention=backend), batch(THREE)
    plain = decode(model, inputs, 4)
    with prune(model, pruner) as run:
        kept = decode(model, inputs, 4)
    assert run.got == [TOKENS * count for count in THREE]
    assert torch.equal(kept.prompt, plain.prompt)
    assert torch.equal(torch.stack(kept.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("name", METHODS)
def test_a_row_decides_alone_as_in_its_batch(name: str) -> None:
    from tests.vlm.common import alone

    model, inputs, pruner = small_llava(), batch(THREE), METHODS[name]
    with prune(model, pruner) as together:
        batched = decode(model, inputs, 2)
    for row in range(len(THREE)):
        with prune(model, pruner) as run:
            single = decode(model, alone(inputs, THREE, row), 2, forced=batched.tokens[row : row + 1])
        assert run.kept[0].tolist() == together.kept[row].tolist()
        for ours, theirs in zip(single.logits, batched.logits, strict=True):
            torch.testing.assert_close(ours[0], theirs[row], atol=1e-5, rtol=0)
