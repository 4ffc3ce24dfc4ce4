"""Kernels with calling rules of their own: FlashAttention (emulated) and FlexAttention prune as SDPA does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dart_lab.probes.attention_mass import AttentionMass
from dart_lab.pruners import DART, FastV, KeepAll, Pruner, UniformGrid, VisionZip
from dart_lab.vlm.insert import prune
from dart_lab.vlm.recording import record
from tests.vlm.common import NEVER, ONE, THREE, Uneven, batch, compare_with_mask, small_llava
from tests.vlm.kernels import FLASH, emulated_flash, uncompiled_flex
from tests.vlm.stepping import decode

METHODS = (DART(keep=5), FastV(keep=4), UniformGrid(keep=0.25), Uneven())
FLEX_METHODS = (DART(keep=5), FastV(keep=4), FastV(keep=4, rerank=True), Uneven())


@pytest.fixture
def as_flash() -> Iterator[None]:
    with emulated_flash():
        yield


def with_kernel(name: str) -> Any:
    model = small_llava()
    model.model.language_model.config._attn_implementation_internal = name
    return model


@pytest.mark.usefixtures("as_flash")
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("pruner", METHODS, ids=lambda p: p.name)
def test_flash_prunes_as_sdpa(pruner: Pruner, images: tuple[int, ...]) -> None:
    ours, inputs = with_kernel(FLASH), batch(images)
    worst, run, steps = compare_with_mask(ours, inputs, pruner, steps=4)
    assert worst <= 1e-5
    plain = small_llava()
    with prune(plain, pruner) as expected:
        theirs = decode(plain, inputs, 4, forced=steps.tokens)
    assert [kept.tolist() for kept in run.kept] == [kept.tolist() for kept in expected.kept]
    for one, other in zip(steps.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("as_flash")
def test_flash_keeping_all_is_bit_identical() -> None:
    model, inputs = with_kernel(FLASH), batch(THREE)
    plain = decode(model, inputs, 3)
    with prune(model, KeepAll()):
        kept = decode(model, inputs, 3)
    assert torch.equal(torch.stack(kept.logits), torch.stack(plain.logits))


@pytest.mark.usefixtures("as_flash")
@pytest.mark.parametrize("pruner", [None, Uneven()], ids=["full", "ragged"])
def test_flash_masses_are_those_of_sdpa(pruner: Pruner | None) -> None:
    tables = []
    for model in (with_kernel(FLASH), small_llava()):
        with record(model, AttentionMass()) as trace:
            if pruner is None:
                plain = decode(model, batch(THREE), 2).logits
            else:
                with prune(model, pruner):
                    decode(model, batch(THREE), 2)
        if pruner is None:
            assert torch.equal(torch.stack(plain), torch.stack(decode(model, batch(THREE), 2).logits))
        tables.append(trace.table(heads=True))
    flash_table, plain_table = tables
    names = ["row", "step", "layer", "head", "query", "key"]
    assert flash_table[names].equals(plain_table[names])
    torch.testing.assert_close(*(torch.tensor(t["mass"].to_numpy()) for t in tables), atol=2e-6, rtol=0)
    sums = flash_table.groupby(names[:-1])["mass"].sum()
    assert (sums - 1).abs().max() <= 1e-6


@pytest.fixture
def uncompiled() -> Iterator[None]:
    with uncompiled_flex():
        yield


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("pruner", FLEX_METHODS, ids=lambda p: p.name)
def test_flex_prunes_as_sdpa(pruner: Pruner, images: tuple[int, ...]) -> None:
    ours, plain, inputs = small_llava(attention="flex_attention"), small_llava(), batch(images)
    with prune(plain, pruner) as expected:
        theirs = decode(plain, inputs, 3)
    with prune(ours, pruner) as run:
        steps = decode(ours, inputs, 3, forced=theirs.tokens)
    assert [kept.tolist() for kept in run.kept] == [kept.tolist() for kept in expected.kept]
    for one, other in zip(steps.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("uncompiled")
def test_flex_drops_as_it_masks_and_keeping_all_changes_nothing() -> None:
    model, inputs = small_llava(attention="flex_attention"), batch(THREE)
    worst, _, _ = compare_with_mask(model, inputs, Uneven(), steps=3)
    assert worst <= 1e-5
    plain = decode(model, inputs, 3)
    with prune(model, KeepAll()):
        kept = decode(model, inputs, 3)
    assert torch.equal(torch.stack(kept.logits), torch.stack(plain.logits))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("pruner", [DART(keep=5), VisionZip(keep=5)], ids=lambda p: p.name)
def test_flex_generates_as_sdpa(pruner: Pruner, cache: str) -> None:
    inputs = batch(THREE)
    inputs.pop("position_ids")
    options = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": NEVER, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    tokens = []
    for model in (small_llava(attention="flex_attention"), small_llava()):
        with prune(model, pruner):
            tokens.append(model.generate(**inputs, **options))
    assert torch.equal(*tokens)


@pytest.mark.usefixtures("uncompiled")
def test_flex_masses_are_those_of_sdpa() -> None:
    tables = []
    for model in (small_llava(attention="flex_attention"), small_llava()):
        with record(model, AttentionMass()) as trace, prune(model, Uneven()):
            decode(model, batch(THREE), 2)
        tables.append(trace.table()["mass"].to_numpy())
    torch.testing.assert_close(*(torch.tensor(table) for table in tables), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pruner", METHODS, ids=lambda p: p.name)
def test_half_precision_drops_as_it_masks(pruner: Pruner, dtype: torch.dtype) -> None:
    """Dropping and masking differ by no more than the precision itself, which rounding of the weights shows."""
    exact, rough, inputs = small_llava(), small_llava().to(dtype), batch(THREE)
    with torch.no_grad():
        full = exact(**inputs).logits
        half = rough(**{**inputs, "pixel_values": inputs["pixel_values"].to(dtype)}).logits.float()
    precision = float((full - half)[inputs["attention_mask"].bool()].abs().max())
    assert precision > 0
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    worst, run, _ = compare_with_mask(rough, inputs, pruner, steps=3)
    assert worst <= 2 * precision
    assert len(run.got) == len(THREE) and min(run.got) >= 1
