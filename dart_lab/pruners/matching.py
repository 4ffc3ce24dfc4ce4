"""Bipartite soft matching: pair similar tokens without clustering (Token Merging, arXiv 2210.09461)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dart_lab.pruners.assignment import MergeMode, merge_assigned, slot_of
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.selectors import ascending, padding_last, top_k


@dataclass(frozen=True, eq=False, kw_only=True)
class Matching:
    """Which tokens merge into which: `source[i]` goes into `target[i]`.

    `source`, `target` `(batch, r)`, `unmerged` `(batch, u)`, `targets` `(batch, t)`: int64 tokens, padded with -1.
    Sources are ordered by falling similarity to their target; `targets` are all odd tokens.
    """

    source: Tensor
    target: Tensor
    unmerged: Tensor
    targets: Tensor

    def sequence(self) -> Tensor:
        """`(batch, m)`: the tokens that stay, unmerged even ones before all odd ones; as they were if none merges."""
        scrambled = padding_last(torch.cat([self.unmerged, self.targets], dim=1))
        merges = (self.source != PAD).any(dim=1, keepdim=True)
        return torch.where(merges, scrambled, ascending(scrambled))


def most_merges(counts: Tensor, protected: Tensor | None = None) -> Tensor:
    """How many tokens one round can merge away: half of those that are not protected; `(batch,)` → `(batch,)`."""
    free = counts if protected is None else counts - protected.sum(dim=1)
    return free.clamp(min=0) // 2


def bipartite_match(metric: Tensor, r: Tensor, valid: Tensor, protected: Tensor | None = None) -> Matching:
    """Match the r even tokens that resemble an odd token most to the odd token they resemble most.

    Args:
        metric: `(batch, n, channels)`, what is compared, by cosine in float32.
        r: `(batch,)` int64, tokens to merge away; limited to `most_merges`.
        valid: `(batch, n)` bool, real tokens, which come before the padding.
        protected: `(batch, n)` bool, tokens that neither merge into another nor receive one, such as the class token.

    Equal similarities go to the lower index. Unmerged tokens follow each other by falling similarity; with `protected`
    they are sorted by index, so that a class token at 0 stays first.

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [1.0, 1.0]]])
    >>> match = bipartite_match(x, torch.tensor([1]), torch.ones(1, 4, dtype=torch.bool))
    >>> match.source, match.target, match.sequence()
    (tensor([[2]]), tensor([[1]]), tensor([[0, 1, 3]]))
    """
    n = metric.shape[1]
    free = valid if protected is None else valid & ~protected
    unit = torch.nn.functional.normalize(metric.float(), dim=-1)
    index = torch.arange(n, device=metric.device)
    even_valid, odd_free = valid[:, ::2], free[:, 1::2]
    r = torch.minimum(r, most_merges(valid.sum(dim=1), None if protected is None else protected & valid))
    r = torch.minimum(r, free[:, ::2].sum(dim=1)).masked_fill(~odd_free.any(dim=1), 0).clamp(min=0)
    if n > 1:
        similarity = (unit[:, ::2] @ unit[:, 1::2].mT).masked_fill(~odd_free[:, None, :], float("-inf"))
        best, partner = similarity.max(dim=2)  # the first of equal ones
    else:
        best, partner = unit.new_full(even_valid.shape, float("-inf")), torch.zeros_like(even_valid, dtype=torch.int64)
    best = best.masked_fill(~free[:, ::2], float("-inf"))
    ranked = top_k(best, even_valid.sum(dim=1), even_valid)
    rank = torch.arange(ranked.shape[1], device=metric.device)
    merges, real = rank < r[:, None], ranked != PAD
    width = int(r.max()) if len(r) else 0
    target = 2 * partner.gather(1, ranked.clamp(min=0)) + 1
    unmerged = padding_last(torch.where(merges | ~real, PAD, 2 * ranked))
    return Matching(
        source=torch.where(merges, 2 * ranked, PAD)[:, :width], target=torch.where(merges, target, PAD)[:, :width],
        unmerged=unmerged if protected is None else ascending(unmerged),
        targets=torch.where(valid[:, 1::2], index[1::2], PAD),
    )


def merge_matched(
    match: Matching, counts: Tensor, *, sizes: Tensor | None = None, mode: MergeMode = "mean"
) -> Reduction:
    """Merge every source into its target.

    Args:
        match: of tokens of which each row has `counts` `(batch,)`.
        sizes: `(batch, n)`, patches that each token stands for; None: 1 each.
        mode: "mean" (Σ size·x / Σ size) or "sum".

    >>> x = torch.tensor([[[1.0], [2.0], [4.0]]])
    >>> match = bipartite_match(x, torch.tensor([1]), torch.ones(1, 3, dtype=torch.bool))
    >>> merge_matched(match, torch.tensor([3])).apply(x)[..., 0]
    tensor([[4.0000, 1.5000]])
    """
    sequence, n = match.sequence(), int(counts.max()) if len(counts) else 0
    slot = slot_of(sequence, n)
    goes = slot.gather(1, match.target.clamp(min=0))
    index = torch.where(match.source == PAD, n, match.source)
    slot = torch.cat([slot, slot[:, :1]], dim=1).scatter(1, index, goes)[:, :n]
    merge, slot_sizes = merge_assigned(slot, sequence.shape[1], sizes=sizes, mode=mode)
    return Reduction(
        keep=ascending(sequence), size=counts, asked=(sequence != PAD).sum(dim=1), slots=sequence, merge=merge,
        sizes=slot_sizes,
    )


def match_in_groups(
    metric: Tensor, k: int, valid: Tensor, *, mode: MergeMode = "mean", tail: Literal["merge", "drop"] = "merge"
) -> Reduction:
    """Of every k tokens the last one stays and takes in those of the others that resemble it most.

    Args:
        metric: `(batch, n, channels)`, compared by cosine in float32.
        k: group length, at least 1; 1 changes nothing.
        valid: `(batch, n)` bool, real tokens, which come before the padding.
        tail: what happens to the n mod k tokens behind the last whole group: "merge" them like the others (default),
            or "drop" them, as the released code does.

    A row shorter than k has no group: with "merge" its last token stands for the missing one.

    >>> x = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.1, 1.0], [0.0, 1.0]]])
    >>> match_in_groups(x, 2, torch.ones(1, 4, dtype=torch.bool)).keep
    tensor([[1, 3]])
    """
    counts, n = valid.sum(dim=1), metric.shape[1]
    index = torch.arange(n, device=metric.device)
    whole = counts // k * k
    stays = valid & ((index % k == k - 1) & (index < whole[:, None]))
    if tail == "merge":
        stays |= valid & (whole == 0)[:, None] & (index == counts[:, None] - 1)
    sequence = ascending(torch.where(stays, index, PAD))[:, : int(stays.sum(dim=1).max())]
    unit = torch.nn.functional.normalize(metric.float(), dim=-1)
    if sequence.shape[1]:
        kept = torch.gather(unit, 1, sequence.clamp(min=0)[:, :, None].expand(-1, -1, unit.shape[2]))
        nearest = (unit @ kept.mT).masked_fill((sequence == PAD)[:, None, :], float("-inf")).argmax(dim=2)
    else:
        nearest = torch.full_like(valid, PAD, dtype=torch.int64)
    own = slot_of(sequence, n)
    goes = valid if tail == "merge" else valid & (index < whole[:, None])
    slot = torch.where(own != PAD, own, torch.where(goes, nearest, PAD))
    merge, sizes = merge_assigned(slot, sequence.shape[1], mode=mode)
    return Reduction(keep=sequence, size=counts, asked=stays.sum(dim=1), merge=merge, sizes=sizes)
