"""Tokens that go into slots: the bookkeeping that merging methods share."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dart_lab.pruners.reduction import PAD, Merge, Reduction

MergeMode = Literal["mean", "sum"]


def slot_of(sequence: Tensor, n: int) -> Tensor:
    """Which slot each token represents: `(batch, m)` tokens in slot order → `(batch, n)` slots, -1 for the others.

    >>> slot_of(torch.tensor([[3, 0, -1]]), 4)
    tensor([[ 1, -1, -1,  0]])
    """
    out = torch.full((len(sequence), n + 1), PAD, dtype=torch.int64, device=sequence.device)
    slots = torch.arange(sequence.shape[1], device=sequence.device).expand_as(sequence)
    return out.scatter(1, torch.where(sequence == PAD, n, sequence), slots)[:, :n]


def merge_assigned(
    slot: Tensor, slots: int, *, sizes: Tensor | None = None, mode: MergeMode = "mean"
) -> tuple[Merge, Tensor]:
    """Merge every token into the one slot it is assigned to.

    Args:
        slot: `(batch, n)` int64, the slot of each token; -1: it goes nowhere.
        slots: how many slots there are.
        sizes: `(batch, n)`, patches that each token stands for; None: 1 each.
        mode: "mean" weights members by their size, Σ size·x / Σ size; "sum" adds them up.

    Returns:
        The merge, and `(batch, slots)` float32, patches that each slot stands for.

    >>> merge, sizes = merge_assigned(torch.tensor([[0, 0, 1, -1]]), 2)
    >>> merge.apply(torch.tensor([[[1.0], [3.0], [5.0], [9.0]]]), 2)[..., 0], sizes
    (tensor([[2., 5.]]), tensor([[2., 1.]]))
    """
    goes = slot != PAD
    size = torch.ones_like(slot, dtype=torch.float32) if sizes is None else sizes.float()
    index = torch.where(goes, slot, slots)
    total = torch.zeros(len(slot), slots + 1, device=slot.device).scatter_add(1, index, size)
    weight = size / total.gather(1, index) if mode == "mean" else torch.ones_like(size)
    source = torch.arange(slot.shape[1], device=slot.device).expand_as(slot)
    return Merge(slot=slot, source=source, weight=weight.masked_fill(~goes, 0.0)), total[:, :slots]


def in_order(reduction: Reduction, key: Tensor) -> Reduction:
    """The same reduction with its slots sorted by `key` `(batch, n)` of the token that represents each slot.

    Equal keys stay in their order.

    >>> first = Reduction(keep=torch.tensor([[0, 2]]), size=torch.tensor([3]), asked=torch.tensor([2]),
    ...                   slots=torch.tensor([[2, 0]]))
    >>> in_order(first, torch.arange(3)[None]).sequence
    tensor([[0, 2]])
    """
    sequence = reduction.sequence
    last = torch.iinfo(torch.int64).max
    keys = key.long().gather(1, sequence.clamp(min=0)).masked_fill(sequence == PAD, last)
    order = keys.argsort(dim=1, stable=True)
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    new_slot = torch.empty_like(order).scatter(1, order, place)
    merge = reduction.merge
    if merge is not None:
        moved = new_slot.gather(1, merge.slot.clamp(min=0)).masked_fill(merge.slot == PAD, PAD)
        merge = Merge(slot=moved, source=merge.source, weight=merge.weight)
    sizes = None if reduction.sizes is None else reduction.sizes.gather(1, order)
    return replace(reduction, slots=sequence.gather(1, order), merge=merge, sizes=sizes)


def unmerge(merged: Tensor, reduction: Reduction) -> Tensor:
    """Give every input token the value of the slot it went into: `(batch, m, c)` → `(batch, n, c)`; 0 if dropped."""
    members = reduction.members()
    home = members.long().argmax(dim=1)  # the first slot that holds the token
    values = torch.gather(merged, 1, home[:, :, None].expand(-1, -1, merged.shape[2]))
    return values * members.any(dim=1)[:, :, None]
