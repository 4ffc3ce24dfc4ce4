"""What a method decided: which visual tokens of each sample stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dart_lab.errors import DartLabError

PAD = -1  # fills the unused end of an index row


@dataclass(frozen=True, eq=False, kw_only=True)
class Reduction:
    """Which of each sample's visual tokens stay.

    Indices count within the sample's own visual tokens (0 … n−1), not within the prompt.

    Attributes:
        keep: `(batch, m)` int64, ascending, `-1` after the end of a shorter row.
        size: `(batch,)` int64, how many visual tokens each sample had.
        asked: `(batch,)` int64, how many were to be kept; `-1` where a threshold decides the number.
        order: `(batch, m)` int64, the same tokens in the order in which they were chosen; None if there is no order.
        score: `(batch, n)` float32, what the tokens were ranked by; NaN beyond a sample's size; None if no ranking.
        notes: further tensors of the method (pivots, ε, bounds …), batch first.

    >>> r = Reduction(keep=torch.tensor([[0, 2]]), size=torch.tensor([4]), asked=torch.tensor([2]))
    >>> r.counts, r.mask()
    (tensor([2]), tensor([[ True, False,  True, False]]))
    """

    keep: Tensor
    size: Tensor
    asked: Tensor
    order: Tensor | None = None
    score: Tensor | None = None
    notes: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def counts(self) -> Tensor:
        """`(batch,)` int64: how many tokens each sample keeps."""
        return (self.keep != PAD).sum(dim=1)

    def mask(self) -> Tensor:
        """`(batch, n)` bool: True where a visual token stays; n is the largest size in the batch."""
        return rows_to_mask(self.keep, int(self.size.max()) if len(self.size) else 0)

    @classmethod
    def from_mask(
        cls, mask: Tensor, size: Tensor, *, asked: Tensor | None = None, order: Tensor | None = None,
        score: Tensor | None = None, notes: Mapping[str, Tensor] | None = None,
    ) -> Reduction:
        """Build from a `(batch, n)` bool mask of the tokens that stay; `asked` defaults to what the mask keeps."""
        counts = mask.sum(dim=1)
        return cls(
            keep=mask_to_rows(mask), size=size, asked=counts if asked is None else asked, order=order, score=score,
            notes=notes or {},
        )

    def check(self, *, size: Tensor, method: str) -> None:
        """Raise `DartLabError` unless the kept sets are sorted, unique, inside the image and over the right tokens."""
        if self.keep.dtype != torch.int64 or self.keep.dim() != 2:
            raise DartLabError(
                f"{method}: keep must be int64 (batch, m), got {self.keep.dtype} of shape {tuple(self.keep.shape)}"
            )
        if not torch.equal(self.size.cpu(), size.cpu()):
            raise DartLabError(
                f"{method}: the reduction covers {self.size.tolist()} tokens, {size.tolist()} are visual; "
                "reduce visual tokens only, or text would be dropped"
            )
        for row, (indices, n) in enumerate(zip(self.keep.tolist(), size.tolist(), strict=True)):
            kept = [i for i in indices if i != PAD]
            if indices[: len(kept)] != kept:
                raise DartLabError(f"{method}: sample {row}: padding (-1) must follow the kept indices")
            outside = [i for i in kept if not 0 <= i < n]
            if outside:
                raise DartLabError(
                    f"{method}: sample {row}: index {outside[0]} is out of span: visual tokens go from 0 to {n - 1}"
                )
            if len(set(kept)) != len(kept):
                raise DartLabError(f"{method}: sample {row}: a duplicate among the kept indices; keep each token once")
            if kept != sorted(kept):
                raise DartLabError(
                    f"{method}: sample {row}: unsorted kept indices; return them ascending and the order of choice as order"
                )


def mask_to_rows(mask: Tensor) -> Tensor:
    """Turn a `(batch, n)` bool mask into `(batch, m)` ascending indices, padded with -1; m is the largest count.

    >>> mask_to_rows(torch.tensor([[True, False, True], [False, True, False]]))
    tensor([[ 0,  2],
            [ 1, -1]])
    """
    n = mask.shape[1]
    counts = mask.sum(dim=1)
    width = int(counts.max()) if len(counts) else 0
    index = torch.where(mask, torch.arange(n, device=mask.device), n).sort(dim=1).values[:, :width]
    return torch.where(index == n, PAD, index)


def rows_to_mask(rows: Tensor, width: int) -> Tensor:
    """Turn `(batch, m)` indices padded with -1, in any order, into a `(batch, width)` bool mask.

    >>> rows_to_mask(torch.tensor([[2, 0], [1, -1]]), 3)
    tensor([[ True, False,  True],
            [False,  True, False]])
    """
    out = torch.zeros(rows.shape[0], width + 1, dtype=torch.bool, device=rows.device)
    out.scatter_(1, torch.where(rows == PAD, width, rows), True)
    return out[:, :width]
