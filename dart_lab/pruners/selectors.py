"""The primitives that methods share: scores in, indices out, in float32, ties to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.reduction import PAD

ROWS_AT_A_TIME = 512  # a block whose float64 copy is small; larger blocks are slower, smaller ones cost more calls


def top_k(score: Tensor, counts: Tensor, valid: Tensor) -> Tensor:
    """The `counts` best tokens of each row, best first; equal scores go to the lower index.

    Args:
        score: `(batch, n)`, higher is better.
        counts: `(batch,)` int64, how many to take.
        valid: `(batch, n)` bool, False for entries that may not be taken.

    Returns:
        `(batch, m)` int64, padded with -1; m is the largest count.

    Raises:
        DartLabError: a score is NaN, or a row has fewer valid entries than its count.

    >>> top_k(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([2]), torch.ones(1, 3, dtype=torch.bool))
    tensor([[1, 2]])
    """
    score = score.float()
    if bool((score.isnan() & valid).any()):
        raise DartLabError("a score is NaN; look for NaN in the model's states (half precision overflow?)")
    if bool((valid.sum(dim=1) < counts).any()):
        raise DartLabError(f"asked for {counts.tolist()} tokens of rows that offer {valid.sum(dim=1).tolist()}")
    ranked = torch.where(valid, score, float("-inf"))
    # -inf is a legal score: rank valid entries before invalid ones whatever their score
    by_score = ranked.argsort(dim=1, descending=True, stable=True)
    by_valid = torch.gather(valid, 1, by_score).long().argsort(dim=1, descending=True, stable=True)
    order = torch.gather(by_score, 1, by_valid)
    width = int(counts.max()) if len(counts) else 0
    taken = torch.arange(width, device=score.device) < counts[:, None]
    return torch.where(taken, order[:, :width], PAD)


def ascending(order: Tensor) -> Tensor:
    """Sort the indices of each row, keeping the padding (-1) at the end: `(batch, m)` → `(batch, m)`."""
    last = torch.iinfo(order.dtype).max
    rows = torch.where(order == PAD, last, order).sort(dim=1).values
    return torch.where(rows == last, PAD, rows)


def padding_last(rows: Tensor) -> Tensor:
    """Move the padding (-1) behind the indices of each row, whose order stays: `(batch, m)` → `(batch, largest count)`.

    >>> padding_last(torch.tensor([[-1, 4, -1, 2], [7, -1, -1, -1]]))
    tensor([[ 4,  2],
            [ 7, -1]])
    """
    real = rows != PAD
    moved = torch.gather(rows, 1, real.long().argsort(dim=1, descending=True, stable=True))
    return moved[:, : int(real.sum(dim=1).max())] if len(rows) else moved


def min_max(values: Tensor, valid: Tensor) -> Tensor:
    """Scale each row of `(batch, n)` to [0, 1] over its valid entries, in float32; a constant row becomes 0."""
    values = values.float()
    low = torch.where(valid, values, float("inf")).min(dim=1, keepdim=True).values
    high = torch.where(valid, values, float("-inf")).max(dim=1, keepdim=True).values
    span = high - low
    return torch.where(valid & (span > 0), (values - low) / span.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine similarity of every pair: a `(batch, p, channels)`, b `(batch, n, channels)` → `(batch, p, n)` float32."""
    norm = torch.linalg.vector_norm(b.float(), dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nn.functional.normalize(a.float(), dim=-1) @ b.float().mT / norm[..., None, :]


def stable_cosine(a: Tensor, b: Tensor) -> Tensor:
    """`cosine`, with equal results for equal vectors, wherever they stand and whatever the batch.

    A float32 matrix product adds in an order that depends on the place, so that copies of a vector differ in the last
    bit and ties are decided by chance. Here products are added in float64 and rounded once. Slower; for a few rows `a`.

    >>> copies = torch.full((1, 7, 3), 0.1)
    >>> stable_cosine(copies[:, :1], copies).unique().numel()
    1
    """
    wide = torch.float32 if a.device.type == "mps" else torch.float64  # that backend has no float64
    left = torch.nn.functional.normalize(a.to(wide), dim=-1)
    product = torch.cat([left @ rows.to(wide).mT for rows in b.split(ROWS_AT_A_TIME, dim=1)], dim=-1)
    norm = torch.linalg.vector_norm(b.float(), dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (product / norm[..., None, :]).float()
