"""Read queries, keys and values of chosen layers beside the model's own attention kernel.

The attention module of a tapped layer gets a copy of its config that names a function of ours; that function calls the
model's own kernel with the same arguments and then lets an observer look. Other layers, other models that share the
config, masks and outputs are untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.vlm import compat


@dataclass(frozen=True, eq=False)
class Captured:
    """What one attention call received.

    `query` is `(batch, heads, queries, head_dim)`, `key` and `value` `(batch, kv_heads, keys, head_dim)`, all after
    rotary embedding and after the cache; `mask` is None, 2-D, 4-D or a block mask, as the backend takes it; without
    one, `causal` rows see the columns before them. `attend` runs the same kernel on the same queries and keys with
    other values: `(batch, kv_heads, keys, head_dim)` → `(batch, queries, heads, head_dim)`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scaling: float
    causal: bool = True
    attend: Callable[[Tensor], Tensor] | None = None


class Tap:
    """While active, call `observer(index, Captured)` after each attention call of the given layers or blocks."""

    def __init__(self, layers: Mapping[int, nn.Module], observer: Callable[[int, Captured], None]) -> None:
        self._modules = {index: compat.self_attention(layer) for index, layer in layers.items()}
        self._observer = observer
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Tap:
        try:
            for index, module in self._modules.items():
                self._attach(index, module)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _attach(self, index: int, module: Any) -> None:
        shared: _Shared = getattr(module.config, _SHARED, None) or _share(module)
        watch = partial(self._observer, index)
        shared.observers.append(watch)

        def leave() -> None:
            shared.observers.remove(watch)
            if not shared.observers:
                compat.attention_registry().pop(shared.name)
                module.config = shared.original

        self._undo.append(leave)


_SHARED = "_dart_lab_tap"


@dataclass(eq=False)
class _Shared:
    """What all taps of one attention module share, so that they leave in any order; the last restores `original`."""

    name: str
    original: Any
    observers: list[Callable[[Captured], None]] = field(default_factory=list)


def _share(module: Any) -> _Shared:
    """Give an attention module a copy of its config that names a function of ours."""
    backend = compat.backend_of(module)
    base = compat.attention_function(module, backend)
    shadow = copy.copy(module.config)
    # unique while the copy lives, also between threads; flash kernels are known by their name, so it is part of ours
    shared = _Shared(f"dart_lab_tap_{backend}_{id(shadow):x}", module.config)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        out = base(module, query, key, value, attention_mask, **kwargs)
        given = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if given is None else given
        causal = bool(getattr(module, "is_causal", True))

        def attend(values: Tensor) -> Tensor:
            again: Tensor = base(module, query, key, values, attention_mask, **{**kwargs, "dropout": 0.0})[0]
            return again

        captured = Captured(query, key, value, attention_mask, scaling, causal, attend)
        for observe in list(shared.observers):
            observe(captured)
        return out

    compat.attention_registry()[shared.name] = attention
    shadow._attn_implementation_internal = shared.name
    setattr(shadow, _SHARED, shared)
    module.config = shadow
    return shared


def attention_rows(captured: Captured, queries: Tensor, past: int) -> Tensor:
    """Softmax rows of chosen queries, recomputed in float32 from what the kernel received.

    Args:
        captured: one attention call with `queries` rows `n` and `keys` columns.
        queries: `(batch, q)` int64, which rows, counted within this call; negative entries give row 0.
        past: columns that were cached before this call (row i sees columns ≤ past + i when no mask is given).

    Returns:
        `(batch, heads, q, keys)` float32; a row that sees nothing is all 0.
    """
    index = queries.clamp(min=0)
    logits = attention_logits(captured, index)
    blocked = _blocked(captured, index, past)
    closed = blocked.dtype == torch.bool
    logits = logits.masked_fill(blocked, float("-inf")) if closed else logits + blocked
    return torch.nan_to_num(torch.softmax(logits, dim=-1), nan=0.0)


def attention_logits(captured: Captured, queries: Tensor) -> Tensor:
    """Scaled products of chosen queries and all keys, before mask and softmax.

    `queries` `(batch, q)` int64, negative entries give row 0 → `(batch, heads, q, keys)` float32.
    """
    query, key = captured.query, captured.key
    batch, heads, _, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    index = queries.clamp(min=0)
    rows = torch.gather(query, 2, index[:, None, :, None].expand(-1, heads, -1, width)).float()
    rows = rows.view(batch, kv_heads, heads // kv_heads, index.shape[1], width)
    return (rows @ key.float()[:, :, None].mT).view(batch, heads, index.shape[1], keys) * captured.scaling


def _blocked(captured: Captured, index: Tensor, past: int) -> Tensor:
    """What each row may not see: `(batch, 1, q, keys)`, bool (True = blocked) or float (to be added)."""
    mask, keys = compat.opened(captured.mask), captured.key.shape[2]
    if isinstance(mask, Tensor) and mask.dim() == 4:
        mask = mask.expand(index.shape[0], -1, -1, -1)
        if mask.shape[2] == 1:  # one row for all queries
            mask = mask.expand(-1, -1, captured.query.shape[2], -1)
        rows = torch.gather(mask, 2, index[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))[..., :keys]
        return ~rows if rows.dtype == torch.bool else rows.float()
    column = torch.arange(keys, device=index.device)
    future = (column > (past + index)[:, None, :, None]) & captured.causal
    if mask is None:
        return future
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return future | ~mask[:, None, None, :keys].bool()
    raise DartLabError(f"attention rows need a mask of 2 or 4 dimensions, got {type(mask).__name__}; use sdpa or eager")
