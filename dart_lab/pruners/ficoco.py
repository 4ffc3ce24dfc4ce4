"""FiCoCo's steps that the vision and the language form share: correlate and compress (arXiv 2411.17686)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dart_lab.pruners.assignment import slot_of
from dart_lab.pruners.reduction import PAD, Merge, Reduction, mask_to_rows, rows_to_mask

Compression = Literal["mean", "add"]


def most_redundant(score: Tensor, gone: Tensor, allowed: Tensor) -> Tensor:
    """The tokens to discard: `(batch, s)` int64, largest score first, -1 after the end; ties to the lower index.

    `score` `(batch, n)`, `gone` `(batch,)` how many, `allowed` `(batch, n)` bool which may go.
    """
    order = score.masked_fill(~allowed, float("-inf")).argsort(dim=1, descending=True, stable=True)
    width = int(gone.max()) if len(gone) else 0
    place = torch.arange(width, device=score.device)
    return order[:, :width].masked_fill(place >= gone[:, None], PAD)


def recipients(
    correlation: Tensor, allowed: Tensor, *, quantile: float = 0.998, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Who receives each discarded token, and how much of it: its correlations in the upper quantile, made to sum to 1.

    Of m allowed columns the values at or above the quantile ε are the m − ⌈(m − 1)·ε⌉ largest, at least one: at 576
    columns and ε = 0.998 two, so that the number adapts to the length and hardly to the token.

    Args:
        correlation: `(batch, s, n)`, discarded tokens against all; not negative where it is allowed.
        allowed: `(batch, s, n)` bool, columns that may receive.
        quantile: ε. Default 0.998.
        most: at most so many. Default: no limit.

    Returns:
        columns `(batch, s, k)` int64, best first, -1 where a row has fewer, and weights `(batch, s, k)` float32.

    >>> recipients(torch.tensor([[[0.1, 0.3, 0.6]]]), torch.ones(1, 1, 3, dtype=torch.bool), quantile=0.5)
    (tensor([[[2, 1]]]), tensor([[[0.6667, 0.3333]]]))
    """
    number = allowed.sum(dim=2)
    wanted = (number - ((number - 1) * quantile - 1e-9).ceil().long()).clamp(min=0).minimum(number)
    if most is not None:
        wanted = wanted.clamp(max=most)
    values = correlation.float().masked_fill(~allowed, float("-inf"))
    width = int(wanted.max()) if wanted.numel() else 0
    best = values.topk(width, dim=2)
    beyond = torch.arange(width, device=values.device) >= wanted[..., None]
    weight = best.values.masked_fill(beyond, 0.0)
    whole = weight.sum(dim=2, keepdim=True)
    even = (~beyond).float() / wanted.clamp(min=1)[..., None]
    weight = torch.where(whole > 0, weight / whole.where(whole > 0, 1.0), even)
    return best.indices.masked_fill(beyond, PAD), weight


def compress(
    discarded: Tensor, column: Tensor, weight: Tensor, size: Tensor, asked: Tensor, *, how: Compression, score: Tensor
) -> Reduction:
    """Merge discarded tokens into their recipients: x_j ← (x_j + Σ α_ij x_i) / (1 + Σ α_ij).

    Args:
        discarded: `(batch, s)` int64 tokens, -1 after the end.
        column, weight: `(batch, s, k)` from `recipients`; recipients must be kept tokens.
        size: `(batch,)` int64, tokens of each sample.
        asked: `(batch,)` int64, tokens to keep.
        how: "mean" divides as above; "add" does not.
        score: `(batch, n)`, what they were ranked by (largest goes first).
    """
    n = score.shape[1]
    valid = torch.arange(n, device=size.device) < size[:, None]
    keep = mask_to_rows(valid & ~rows_to_mask(discarded, n))
    slots = keep.shape[1]
    sent = (column != PAD) & (discarded[..., None] != PAD)
    slot = slot_of(keep, n).gather(1, column.clamp(min=0).flatten(1)).masked_fill(~sent.flatten(1), PAD)
    alpha = weight.flatten(1).masked_fill(slot == PAD, 0.0)
    source = discarded.clamp(min=0)[..., None].expand_as(column).flatten(1)
    own = torch.arange(slots, device=keep.device).where(keep != PAD, PAD)
    slot, source = torch.cat([own, slot], dim=1), torch.cat([keep.clamp(min=0), source], dim=1)
    alpha = torch.cat([(keep != PAD).float(), alpha], dim=1)
    if how == "mean":
        place = slot.where(slot != PAD, slots)
        total = torch.zeros(len(slot), slots + 1, device=slot.device).scatter_add(1, place, alpha)
        alpha = alpha / total.gather(1, place).clamp(min=torch.finfo(torch.float32).tiny)
    return Reduction(
        keep=keep,
        size=size,
        asked=asked,
        merge=Merge(slot=slot, source=source, weight=alpha),
        score=(-score.float()).masked_fill(~valid, float("nan")),
    )


def local_penalty(score: Tensor, window: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Push the most redundant token of every window towards being discarded: × factor if positive, ÷ factor if not.

    Args:
        score: `(batch, n)`, larger goes first.
        window: `(batch, n)` int64, the window of each token; -1: in none.
        factor: at least 1.

    Returns:
        the new scores, and `(batch, n)` bool, the tokens that were pushed (ties: the lower index).

    >>> local_penalty(torch.tensor([[1.0, 3.0, -1.0, -2.0]]), torch.tensor([[0, 0, 1, 1]]), 2.0)[0]
    tensor([[ 1.0000,  6.0000, -0.5000, -2.0000]])
    """
    order = score.argsort(dim=1, descending=True, stable=True)
    ranked = window.gather(1, order)
    windows = int(window.max()) + 1 if window.numel() else 0
    first = torch.full((len(score), windows + 1), score.shape[1], dtype=torch.int64, device=score.device)
    place = torch.arange(score.shape[1], device=score.device).expand_as(order)
    first.scatter_reduce_(1, ranked.where(ranked != PAD, windows), place, reduce="amin")
    pushed = torch.zeros_like(window, dtype=torch.bool)
    pushed.scatter_(1, order, (first.gather(1, ranked.clamp(min=0)) == place) & (ranked != PAD))
    moved = torch.where(score > 0, score * factor, score / factor)
    return torch.where(pushed, moved, score), pushed


def unit_length(values: Tensor, valid: Tensor) -> Tensor:
    """Scores `(batch, n)` of a sample scaled to an L2 norm of 1; 0 where not valid."""
    masked = values.float().masked_fill(~valid, 0.0)
    return masked / masked.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
