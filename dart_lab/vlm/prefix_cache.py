"""A KV cache whose first layers several branches of one prompt share: kept once, however many branches there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from dart_lab.vlm.compat import new_cache


class PrefixLayer(DynamicLayer):  # type: ignore[misc]
    """One layer: columns that all branches share, and behind them each branch's own.

    Args:
        keys, values: `(batch, heads, shared, channels)`.
        copies: branches; rows of the model's batch are those of the first branch, then of the second …
    """

    def __init__(self, keys: Tensor, values: Tensor, copies: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._shared, self._copies = (keys, values), copies
        batch, heads, _, channels = keys.shape
        self.keys = keys.new_empty(copies * batch, heads, 0, channels)
        self.values = values.new_empty(copies * batch, heads, 0, values.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the branches' new columns; gives all columns, for this one call."""
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self._whole(self._shared[0], self.keys), self._whole(self._shared[1], self.values)

    def get_seq_length(self) -> int:
        """Columns so far."""
        return self._shared[0].shape[-2] + self.keys.shape[-2]

    def _whole(self, shared: Tensor, own: Tensor) -> Tensor:
        parts = [shared.expand(self._copies, *shared.shape), own.unflatten(0, (self._copies, -1))]
        return torch.cat(parts, dim=-2).flatten(0, 1)


def shared_cache(cache: Any, layers: int, length: int, copies: int) -> Any:
    """A cache of `copies` branches: the first `layers` layers up to column `length` from `cache`, the others empty."""
    out = new_cache()
    for held in cache.layers[:layers]:
        out.layers.append(PrefixLayer(held.keys[:, :, :length], held.values[:, :, :length], copies))
    return out
