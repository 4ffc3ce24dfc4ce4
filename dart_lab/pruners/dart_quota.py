"""How many tokens each of DART's pivots takes: spent exactly, or as the released code computes it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dart_lab.errors import DartLabError

OfficialPath = Literal["llava", "llava_next", "epic"]


def exact_quota(total: Tensor, real: Tensor) -> Tensor:
    """Spread `total` over the pivots as evenly as possible, the first pivots taking the remainder.

    Args:
        total: `(batch,)` int64, tokens to take in all.
        real: `(batch, pivots)` bool, False where a row has fewer pivots.

    >>> exact_quota(torch.tensor([7]), torch.tensor([[True, True, False, True]]))
    tensor([[3, 2, 0, 2]])
    """
    pivots = real.sum(dim=1).clamp(min=1)
    rank = real.long().cumsum(dim=1) - 1
    quota = (total // pivots)[:, None] + (rank < (total % pivots)[:, None])
    return torch.where(real, quota, 0)


def official_quota(keep: int | float, size: Tensor, image_pivots: int, real: Tensor, path: OfficialPath) -> Tensor:
    """The equal quota t of the released code, which keeps image_pivots + P·t tokens of P pivots.

    Args:
        keep: N, a number of tokens, or the retained share of each sample's visual tokens.
        size: `(batch,)` int64, visual tokens of each sample.
        image_pivots: how many of the pivots are visual tokens.
        real: `(batch, pivots)` bool.
        path: "llava", "llava_next" or "epic", see `DART`.

    Raises:
        DartLabError: a pivot would find fewer than t tokens left (not with "llava_next" and "epic").

    >>> official_quota(128, torch.tensor([576]), 4, torch.ones(1, 8, dtype=torch.bool), "llava")[0, 0]
    tensor(16)
    """
    pivots = real.sum(dim=1)
    pool = size - image_pivots
    if isinstance(keep, int):
        nominal = torch.full_like(size, keep)
        t = (nominal.minimum(pool) if path == "llava_next" else nominal) // pivots
    else:
        t = (size.double() * keep / pivots).long()  # truncated, binary rounding errors included
        t = t.minimum(pool // pivots) if path == "llava_next" else t
    quota = t[:, None] * real
    if path == "epic":
        before = quota.cumsum(dim=1) - quota
        quota = quota.minimum((pool[:, None] - before).clamp(min=0))
    for n, p, each, left in zip(size.tolist(), pivots.tolist(), t.tolist(), pool.tolist(), strict=True):
        if path != "epic" and p * each > left:
            raise DartLabError(
                f"dart: the released code cannot keep {keep} of {n} visual tokens: {p} pivots of {each} tokens "
                f"exceed the {left} that are no pivots; give keep={_nearest(keep, n, p, left)} or less, or exact budget"
            )
    return quota


def _nearest(keep: int | float, size: int, pivots: int, pool: int) -> int | float:
    """The largest feasible `keep` of the same kind."""
    most = pool // pivots
    return pivots * (most + 1) - 1 if isinstance(keep, int) else math.ceil(pivots * most / size * 1e4) / 1e4


def check_pivots(images: Tensor, texts: Tensor, size: Tensor, text_size: Tensor) -> None:
    """Raise `DartLabError` where a sample has fewer tokens than pivots, or no pivot at all; arguments `(batch,)`."""
    rows = zip(images.tolist(), texts.tolist(), size.tolist(), text_size.tolist(), strict=True)
    for row, (p, q, n, t) in enumerate(rows):
        if p > n:
            raise DartLabError(f"dart: sample {row}: image_pivots={p} but it has {n} visual tokens; give at most {n}")
        if q > t:
            raise DartLabError(
                f"dart: sample {row}: the released code needs text_pivots={q} tokens after the image, here are {t}; "
                f"give text_pivots={t}, or budget='exact', which makes do with what is there"
            )
        if n and p + q == 0:
            raise DartLabError(
                f"dart: sample {row}: no pivot: image_pivots=0 and no text follows the image; give image_pivots=1"
            )
