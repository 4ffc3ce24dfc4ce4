"""Greedy choices of tokens that differ, or that cover the others; each step is one pass over all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.selectors import cosine

SAME = 1e-6  # cosine distances below this are rounding: the two tokens are one
_LEAST = torch.finfo(torch.float32).eps


def cosine_distance(tokens: Tensor) -> Tensor:
    """1 − cosine of every pair: `(batch, n, channels)` → `(batch, n, n)` float32; 0 between duplicates."""
    distance = 1 - cosine(tokens, tokens)
    return distance.masked_fill(distance < SAME, 0.0)


def isolation(distance: Tensor, valid: Tensor) -> Tensor:
    """`(batch, n)`: distance of each token to the nearest other valid one; infinite where there is no other."""
    itself = torch.eye(distance.shape[1], dtype=torch.bool, device=distance.device)
    return distance.masked_fill(itself | ~valid[:, None, :], torch.inf).amin(dim=2)


def farthest_point(
    distance: Tensor, counts: Tensor, valid: Tensor, *, pivots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Greedy max–min selection: always add the token farthest from those taken so far. O(counts·n) after the distances.

    Args:
        distance: `(batch, n, n)`, symmetric.
        counts: `(batch,)` int64, how many to add.
        valid: `(batch, n)` bool, False for entries that may not be taken.
        pivots: `(batch, p)` int64, -1 padded: tokens already taken, not taken again. None: start from the most isolated
            token.

    Returns:
        The tokens in the order they were taken, `(batch, m)` int64 padded with -1, and the distance at which each was
        taken, `(batch, m)` float32; from the second token on (from the first, with pivots) it never grows.

    Raises:
        DartLabError: a row offers fewer tokens than its count.

    >>> line = torch.tensor([[0.0, 1.0, 2.0, 10.0]])
    >>> order, reach = farthest_point((line[:, :, None] - line[:, None]).abs(), torch.tensor([3]), line >= 0)
    >>> order, reach
    (tensor([[3, 0, 2]]), tensor([[ 8., 10.,  2.]]))
    """
    free, near = valid.clone(), distance.new_full(valid.shape, torch.inf)
    if pivots is None:
        first = isolation(distance, valid)
    else:
        taken = pivots[:, :, None].expand(-1, -1, distance.shape[2])
        to_pivots = distance.gather(1, taken.clamp(min=0)).masked_fill(taken == PAD, torch.inf)
        near = torch.cat([to_pivots, near[:, None]], dim=1).amin(dim=1)
        free &= ~_among(pivots, valid.shape[1])
        first = near
    _check_offer(counts, free)
    order, reach = [], []
    for step in range(_steps(counts)):
        best, pick = _best(near if step else first, free)
        order.append(pick)
        reach.append(best)
        near = torch.minimum(near, _row(distance, pick))
        free = free.scatter(1, pick[:, None], False)
    return _stack(order, reach, counts)


def dpp_map(kernel: Tensor, counts: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy most probable subset of a determinantal point process: always add what multiplies the determinant most.

    Keeps the rows of the kernel's Cholesky factor as it goes: O(counts²·n). A residual below the rounding of the
    factorisation counts as 0, so that tokens spanned by those taken come last, by index, and no NaN arises.

    Args:
        kernel: `(batch, n, n)`, symmetric positive semidefinite.
        counts: `(batch,)` int64.
        valid: `(batch, n)` bool.

    Returns:
        The tokens in the order taken `(batch, m)`, -1 padded, and the factor that each multiplied the determinant by.
        Raises `DartLabError` if a row offers fewer tokens than its count.

    >>> dpp_map(torch.tensor([[[4.0, 3.9, 0.0], [3.9, 4.0, 0.0], [0.0, 0.0, 1.0]]]), torch.tensor([2]),
    ...         torch.ones(1, 3, dtype=torch.bool))[0]
    tensor([[0, 2]])
    """
    _check_offer(counts, valid)
    kernel, free, steps = kernel.float(), valid.clone(), _steps(counts)
    residual = kernel.diagonal(dim1=1, dim2=2)
    floor = residual.masked_fill(~valid, 0.0).amax(dim=1, keepdim=True) * _LEAST * kernel.shape[1]
    factor = kernel.new_zeros(len(kernel), steps, kernel.shape[2])  # rows of the Cholesky factor so far
    order, gain = [], []
    for step in range(steps):
        residual = residual.masked_fill(residual <= floor, 0.0)
        best, pick = _best(residual, free)
        order.append(pick)
        gain.append(best)
        free = free.scatter(1, pick[:, None], False)
        explained = (factor[:, :step].gather(2, pick[:, None, None].expand(-1, step, 1)) * factor[:, :step]).sum(dim=1)
        scale = best.clamp(min=torch.finfo(torch.float32).tiny).rsqrt()[:, None]
        row = torch.where(best[:, None] > 0, (_row(kernel, pick) - explained) * scale, 0.0)
        factor[:, step] = row
        residual = residual - row.square()
    return _stack(order, gain, counts)


def facility_location(
    similarity: Tensor, counts: Tensor, valid: Tensor, *, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Greedy coverage: always add the token that raises Σⱼ max over taken i of similarity(i, j) most. O(counts·n²).

    The coverage of every token starts at 0: negative similarities cover nothing.

    Args:
        similarity: `(batch, n, n)`, from the token that covers (axis 1) to the one covered.
        counts: `(batch,)` int64.
        valid: `(batch, n)` bool.
        weight: `(batch, n)`, multiplies the gain of each token; None: 1.

    Returns:
        The tokens in the order taken `(batch, m)`, -1 padded, and their (weighted) gains; without weights the gains
        never grow. Raises `DartLabError` if a row offers fewer tokens than its count.

    >>> near = torch.tensor([[[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    >>> facility_location(near, torch.tensor([2]), torch.ones(1, 3, dtype=torch.bool))[0]
    tensor([[0, 2]])
    """
    _check_offer(counts, valid)
    similarity = similarity.float().masked_fill(~valid[:, None, :], 0.0)
    covered, free = similarity.new_zeros(valid.shape), valid.clone()
    order, gains = [], []
    for _ in range(_steps(counts)):
        gain = (similarity - covered[:, None, :]).clamp(min=0).sum(dim=2)
        best, pick = _best(gain if weight is None else gain * weight, free)
        order.append(pick)
        gains.append(best)
        covered = torch.maximum(covered, _row(similarity, pick))
        free = free.scatter(1, pick[:, None], False)
    return _stack(order, gains, counts)


def _best(score: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Largest score of each row among the free tokens, and its place; the first of equals, free ones before others."""
    ranked = torch.where(free, score, -torch.inf)
    best = ranked.amax(dim=1)
    return best, (free & (ranked == best[:, None])).long().argmax(dim=1)


def _row(matrix: Tensor, pick: Tensor) -> Tensor:
    """Row `pick[b]` of each `(batch, n, n)` matrix: `(batch, n)`."""
    return matrix.gather(1, pick[:, None, None].expand(-1, 1, matrix.shape[2]))[:, 0]


def _among(rows: Tensor, n: int) -> Tensor:
    return (rows[:, :, None] == torch.arange(n, device=rows.device)).any(dim=1)


def _steps(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0


def _check_offer(counts: Tensor, free: Tensor) -> None:
    if bool((free.sum(dim=1) < counts).any()):
        raise DartLabError(f"asked for {counts.tolist()} tokens of rows that offer {free.sum(dim=1).tolist()}")


def _stack(order: list[Tensor], values: list[Tensor], counts: Tensor) -> tuple[Tensor, Tensor]:
    """Steps into `(batch, m)` rows; a row's steps beyond its count become -1 and NaN."""
    if not order:
        empty = counts.new_zeros(len(counts), 0)
        return empty, empty.float()
    taken = torch.arange(len(order), device=counts.device) < counts[:, None]
    return torch.where(taken, torch.stack(order, dim=1), PAD), torch.where(taken, torch.stack(values, dim=1), torch.nan)
