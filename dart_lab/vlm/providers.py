"""The signals of a decoder layer, computed when a method asks for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm import compat
from dart_lab.vlm.tap import Captured, attention_logits, attention_rows

_ROWS_AT_ONCE = 256  # query rows whose attention is held in memory together


def layer_providers(
    text: Any,
    captured: Captured,
    *,
    layer: int,
    states: Tensor,
    before: int,
    attended: Tensor,
    embeds: Callable[[], Tensor | None],
    entered: Callable[[], Tensor | None],
    positions: Callable[[], Any],
) -> dict[str, Callable[..., Tensor]]:
    """Providers for a method before decoder layer `layer`.

    Args:
        text: the stack of decoder layers.
        captured: what the attention of layer `layer − 1` received.
        states: `(batch, sequence, channels)` output of layer `layer − 1`.
        before: slots that layer `layer − 1` had cached before this pass.
        attended: `(batch, sequence)` bool, real tokens.
        embeds, entered: () → input embeddings, and the input of layer `layer − 1`, of the same tokens.
        positions: () → (cos, sin) of the same tokens.
    """
    here = slice(before, before + states.shape[1])

    def delta() -> Tensor:
        return states - _there(entered(), "delta")

    return {
        "hidden": lambda: states,
        "normed": lambda: text.norm.forward(states),  # not a call: hooks of others on the norm stay quiet
        "embeds": lambda: _there(embeds(), "embeds"),
        "delta": delta,
        "keys": lambda: captured.key[:, :, here],
        "values": lambda: captured.value[:, :, here],
        "attention": lambda queries: attention_rows(captured, queries, before)[..., here],
        "attention_logits": lambda queries: attention_logits(captured, queries)[..., here],
        "attention_ahead": lambda queries: rows_ahead(text.layers[layer], states, positions(), queries, attended),
        "received": lambda: received(captured, attended, before)[:, here],
    }


def received(captured: Captured, attended: Tensor, before: int) -> Tensor:
    """Attention that each key receives: `(batch, keys)` float32, mean over heads, summed over the real queries.

    Computed in blocks of rows, so that no queries × keys matrix is held.
    """
    total = torch.zeros(len(attended), captured.key.shape[2], device=captured.key.device)
    for rows, real in _blocks_of_rows(captured, attended, before):
        total += (rows.mean(dim=1) * real[:, :, None]).sum(dim=1)
    return total


def received_by_head(captured: Captured, attended: Tensor) -> Tensor:
    """The same of a causal call without a cache, apart by heads: `(batch, heads, keys)` float32, mean over those real
    queries that see the key, 0 for a key that none sees.
    """
    total = torch.zeros(*captured.query.shape[:2], captured.key.shape[2], device=captured.key.device)
    for rows, real in _blocks_of_rows(captured, attended, 0):
        total += (rows * real[:, None, :, None]).sum(dim=2)
    seen_by = attended.flip(1).cumsum(dim=1).flip(1)
    return total / seen_by.clamp(min=1)[:, None]


def _blocks_of_rows(captured: Captured, attended: Tensor, before: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention `(batch, heads, rows, keys)` of some queries after the other, and which of them are real."""
    batch, length = attended.shape
    for start in range(0, length, _ROWS_AT_ONCE):
        rows = torch.arange(start, min(start + _ROWS_AT_ONCE, length), device=attended.device).expand(batch, -1)
        yield attention_rows(captured, rows, before), attended[:, start : start + _ROWS_AT_ONCE]


def rows_ahead(layer: Any, states: Tensor, positions: Any, queries: Tensor, attended: Tensor) -> Tensor:
    """Softmax rows of a layer that has not run yet, by its own norm, projections and rotary embedding.

    `queries` `(batch, q)` → `(batch, heads, q, sequence)` float32, causal, padding excluded.
    """
    attention = compat.self_attention(layer)
    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotate is None or not hasattr(attention, "q_proj"):
        raise DartLabError(
            f"attention_ahead is not known for {type(attention).__name__}; use a method that looks at layer K-1"
        )
    normed = layer.input_layernorm(states)
    shape = (*states.shape[:2], -1, attention.head_dim)
    query, key = attention.q_proj(normed).view(shape), attention.k_proj(normed).view(shape)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *positions)
    captured = Captured(query, key, key, attended.long(), attention.scaling)
    return attention_rows(captured, queries, 0)


def _there(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise DartLabError(f"{name} was not recorded in this pass; declare it in the method's `needs`")
    return tensor
