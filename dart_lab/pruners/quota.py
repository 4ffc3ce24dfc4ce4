"""Sharing a number of tokens out over groups, and choosing within each group."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.reduction import rows_to_mask
from dart_lab.pruners.selectors import top_k


def apportion(total: int, weights: Tensor, limits: Tensor) -> Tensor:
    """Share `total` out in proportion to `weights`, no group getting more than its limit, all of it spent.

    Whole numbers by largest remainder, ties to the first group; what a full group cannot take goes to the others in
    proportion to theirs. Groups of weight 0 get something only when all others are full.

    Args:
        total: what is to be shared.
        weights: `(groups,)`, none negative.
        limits: `(groups,)` int64.

    Returns:
        `(groups,)` int64 that sums to `total`. Raises `DartLabError` if the limits do not allow that.

    >>> apportion(10, torch.tensor([3.0, 1.0, 1.0]), torch.tensor([4, 9, 9]))
    tensor([4, 3, 3])
    """
    if total > int(limits.sum()):
        raise DartLabError(f"cannot share {total} tokens over groups that hold {limits.tolist()}")
    given = torch.zeros_like(limits)
    weights = weights.double()
    while (left := total - int(given.sum())) > 0:
        room = given < limits
        heavy = torch.where(room, weights, 0.0)
        heavy = heavy if bool(heavy.sum() > 0) else room.double()
        ideal = left * heavy / heavy.sum()
        share = ideal.floor().long()
        rest = (ideal - share).masked_fill(~room, -1.0)
        share[rest.argsort(descending=True, stable=True)[: left - int(share.sum())]] += 1
        given = torch.minimum(given + share * room, limits)
    return given


def top_k_by_group(score: Tensor, group: Tensor, quotas: Tensor, valid: Tensor) -> Tensor:
    """The best tokens of every group; equal scores go to the lower index.

    Args:
        score: `(batch, n)`.
        group: `(batch, n)` int64, 0 … groups − 1.
        quotas: `(batch, groups)` int64, how many of each group.
        valid: `(batch, n)` bool.

    Returns:
        `(batch, n)` bool. Raises `DartLabError` if a group is smaller than its quota.

    >>> top_k_by_group(torch.tensor([[1.0, 2.0, 3.0, 0.0]]), torch.tensor([[0, 0, 0, 1]]), torch.tensor([[1, 1]]),
    ...                torch.ones(1, 4, dtype=torch.bool))
    tensor([[False, False,  True,  True]])
    """
    chosen = torch.zeros_like(valid)
    for g in range(quotas.shape[1]):
        chosen |= rows_to_mask(top_k(score, quotas[:, g], valid & (group == g)), valid.shape[1])
    return chosen


def upper_outliers(values: Tensor, valid: Tensor, *, whiskers: float = 1.5) -> Tensor:
    """`(batch, n)` bool: values above the third quartile by more than `whiskers` interquartile ranges (Tukey's rule).

    >>> upper_outliers(torch.tensor([[1.0, 2.0, 3.0, 4.0, 50.0]]), torch.ones(1, 5, dtype=torch.bool))
    tensor([[False, False, False, False,  True]])
    """
    shown = torch.where(valid, values.float(), torch.nan)
    first, third = torch.nanquantile(shown, torch.tensor([0.25, 0.75], device=values.device), dim=1)
    return valid & (values > (third + whiskers * (third - first))[:, None])
