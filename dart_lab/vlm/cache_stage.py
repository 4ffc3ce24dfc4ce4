"""Reduce the KV caches of decoder layers once the prompt has run; no token leaves the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import PAD, Reduction, mask_to_rows
from dart_lab.pruners.signals import Signals
from dart_lab.vlm import compat, ragged
from dart_lab.vlm.cuts import Cut, make_cut
from dart_lab.vlm.passes import Pass
from dart_lab.vlm.run import Sample

DecideCache = Callable[[Pruner, int, Signals, "list[Sample]"], Reduction]


def reduce_caches(
    text: Any, cache: Any, now: Pass, parts: Sequence[Pruner], decide: DecideCache, received: dict[int, Tensor]
) -> None:
    """Apply every part to the caches of its layers, from `part.stage.layer` to the last.

    Args:
        text: the stack of decoder layers.
        cache: the cache after the prompt.
        now: the prompt's pass.
        decide: part, decoder layer, signals of that layer's cache, the prompt's samples → reduction.
        received: layer → `(batch, slots)` attention that each slot received, where a part asks for it.

    Raises:
        DartLabError: there is no cache, or one of fixed length.
    """
    for part in parts:
        for index in range(part.stage.layer, len(text.layers)):
            layer = compat.cache_layer(cache, index)
            if layer is None:
                raise DartLabError(
                    f"{part.name} reduces the KV cache, but the model runs without one; set use_cache=True"
                )
            if compat.fixed_length(layer) is not None:
                raise DartLabError(f"{part.name} cannot shorten a static cache; use the default one")
            _reduce_layer(part, index, layer, compat.cache_layer(cache, len(text.layers) - 1), now, decide, received)


def _reduce_layer(
    part: Pruner, index: int, layer: Any, last: Any, now: Pass, decide: DecideCache, received: dict[int, Tensor]
) -> None:
    keys: Tensor = layer.keys
    device = keys.device
    columns = _columns(layer, now, len(keys), device)
    visual = torch.zeros(len(keys), now.total, dtype=torch.bool, device=device)
    if now.visual is not None:
        visual[:, now.past :] = now.visual.to(device)
    visual = visual.gather(1, columns.clamp(min=0)) & (columns != PAD)
    attended = columns != PAD
    if now.attended is not None:
        attended &= now.attended.to(device).gather(1, columns.clamp(min=0))
    chosen_from = attended if part.whole_cache else visual
    survivors = torch.zeros(len(keys), now.total + 1, dtype=torch.bool, device=device)
    final = _columns(last, now, len(keys), device)
    survivors.scatter_(1, final.where(final != PAD, now.total), True)
    positions = mask_to_rows(chosen_from)
    signals = Signals(
        visual=positions,
        attended=attended,
        providers={
            "keys": lambda: keys,
            "values": lambda: layer.values,
            "survives": lambda: survivors[:, :-1].gather(1, columns.clamp(min=0)),
            **({"received": lambda: received[index]} if index in received else {}),
        },
    )
    reduction = decide(part, index, signals, now.samples)
    if reduction.merge is None and torch.equal(reduction.counts, signals.counts):
        return
    cut = make_cut(reduction, layer=index, rows=columns, visual=chosen_from, positions=positions, compact=False)
    layer.keys, layer.values = _cut(cut, keys), _cut(cut, layer.values)
    ragged.remember(layer, cut.rows, now.total, cut.hollow, ragged.shift_of(layer))


def _columns(layer: Any, now: Pass, batch: int, device: torch.device) -> Tensor:
    """`(batch, slots)` columns that a cache layer holds."""
    known = ragged.columns_of(layer, now.total)
    return torch.arange(now.total, device=device).expand(batch, -1) if known is None else known.to(device)


def _cut(cut: Cut, states: Tensor) -> Tensor:
    """Reduce the slots of cached keys or values `(batch, heads, slots, head_dim)`."""
    batch, heads, _, width = states.shape
    short = cut.states(states.transpose(1, 2).flatten(2))
    return short.view(batch, -1, heads, width).transpose(1, 2).contiguous()
