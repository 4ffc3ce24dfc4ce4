"""Attention kernels as a CPU can run them: FlashAttention emulated, FlexAttention without its compiler."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from dart_lab.vlm import compat

FLASH = "emulated_flash_attention"


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


@contextmanager
def emulated_flash() -> Iterator[None]:
    """The emulated kernel under a name that transformers takes for FlashAttention."""
    compat.attention_registry()[FLASH] = flash
    masks = AttentionMaskInterface  # without a mask function, transformers would give the kernel no mask at all
    masks.register(FLASH, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    try:
        yield
    finally:
        compat.attention_registry().pop(FLASH)
        masks._global_mapping.pop(FLASH)


@contextmanager
def uncompiled_flex() -> Iterator[None]:
    """FlexAttention without its compiler, which takes half a minute a shape on a CPU and fails on some."""

    def block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return create_block_mask(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        patch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
        patch.setattr(masking_utils, "create_block_mask", block_mask)
        yield
