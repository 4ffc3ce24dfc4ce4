"""Kernels with calling rules of their own: FlashAttention (emulated) and FlexAttention prune as SDPA does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from dart_lab.probes.attention_mass import AttentionMass
from dart_lab.pruners import DART, FastV, KeepAll, Pruner, UniformGrid, VisionZip
from dart_lab.vlm import compat
from dart_lab.vlm.insert import prune
from dart_lab.vlm.recording import record
from tests.vlm.common import NEVER, ONE, THREE, Uneven, batch, compare_with_mask, small_llava
from tests.vlm.stepping import decode

FLASH = "emulated_flash_attention"
METHODS = (DART(keep=5), FastV(keep=4), UniformGrid(keep=0.25), Uneven())
FLEX_METHODS = (DART(keep=5), FastV(keep=4), FastV(keep=4, rerank=True), Uneven())


def flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """FlashAttention's rules: a mask is `(batch, keys)` or None; padding is taken out of queries and keys, and what is
    left is causal by its order, the last query seeing the last key. Rows of padding come out as 0.
    """
    assert attention_mask is None or attention_mask.shape == (query.shape[0], key.shape[2])
    heads, count = query.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
    out = torch.zeros_like(query[..., : value.shape[3]])
    for row in range(len(query)):
        real = torch.ones(key.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask[row].bool()
        asks = real[len(real) - count :]
        q, k, v = query[row][:, asks], key[row][:, real], value[row][:, real]
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        logits = q @ k.mT * (query.shape[3] ** -0.5 if scaling is None else scaling)
        out[row, :, asks] = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ v
    return out.transpose(1, 2), None


@pytest.fixture
def as_flash() -> Iterator[None]:
    """The emulated kernel under a name that transformers takes for FlashAttention."""
    compat.attention_registry()[FLASH] = flash
    masks = AttentionMaskInterface  # without a mask function, transformers would give the kernel no mask at all
    masks.register(FLASH, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    yield
    compat.attention_registry().pop(FLASH)
    masks._global_mapping.pop(FLASH)


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
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without its compiler, which takes half a minute a shape on a CPU."""
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda *args, _compile=False, **kwargs: create_block_mask(*args, **kwargs)
    )


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
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
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_drops_as_it_masks_and_keeping_all_changes_nothing() -> None:
    model, inputs = small_llava(attention="flex_attention"), batch(THREE)
    worst, _, _ = compare_with_mask(model, inputs, Uneven(), steps=3)
    assert worst <= 1e-5
    plain = decode(model, inputs, 3)
    with prune(model, KeepAll()):
        kept = decode(model, inputs, 3)
    assert torch.equal(torch.stack(kept.logits), torch.stack(plain.logits))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
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
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
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
