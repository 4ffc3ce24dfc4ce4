"""What a method decided: which visual tokens of each sample stay, and what merges into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dart_lab.errors import DartLabError

PAD = -1  # fills the unused end of an index row
_ENTRIES_AT_ONCE = 16_384  # of a merge, so that means over many tokens stay small in memory


@dataclass(frozen=True, eq=False, kw_only=True)
class Merge:
    """Sparse weights: output slot `slot` receives `weight` times input token `source`, summed over the entries.

    All three are `(batch, entries)`: int64 slots (`-1`: no entry), int64 sources, float32 weights. A slot's own token
    is an entry like any other: a mean of three tokens is three entries of weight 1/3, adding one token to another is
    two of 1.
    """

    slot: Tensor
    source: Tensor
    weight: Tensor

    @classmethod
    def from_dense(cls, weights: Tensor) -> Merge:
        """From `(batch, m, n)` weights; entries in order of slot, then source."""
        used = weights != 0
        width = int(used.flatten(1).sum(dim=1).max()) if len(weights) else 0
        index = mask_to_rows(used.flatten(1))
        slot = torch.where(index == PAD, PAD, index // weights.shape[2])
        weight = weights.flatten(1).gather(1, index.clamp(min=0)).float().masked_fill(index == PAD, 0.0)
        return cls(slot=slot[:, :width], source=(index % weights.shape[2]).masked_fill(index == PAD, 0), weight=weight)

    def dense(self, slots: int, tokens: int) -> Tensor:
        """`(batch, slots, tokens)` float32."""
        out = torch.zeros(len(self.slot), slots * tokens + 1, device=self.weight.device)
        index = torch.where(self.slot == PAD, slots * tokens, self.slot * tokens + self.source)
        return out.scatter_add(1, index, self.weight)[:, :-1].unflatten(1, (slots, tokens))

    def apply(self, states: Tensor, slots: int) -> Tensor:
        """Merge `(batch, n, channels)` → `(batch, slots, channels)`, summed in float32, in the dtype of `states`."""
        out = torch.zeros(len(states), slots + 1, states.shape[2], device=states.device)
        for start in range(0, self.slot.shape[1], _ENTRIES_AT_ONCE):
            part = slice(start, start + _ENTRIES_AT_ONCE)
            values = self.weight[:, part, None] * gather_tokens(states.float(), self.source[:, part])
            index = torch.where(self.slot == PAD, slots, self.slot)[:, part, None].expand_as(values)
            out.scatter_add_(1, index, values)
        return out[:, :slots].to(states.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reduction:
    """Which of each sample's visual tokens stay, and what merges into them.

    Indices count within the sample's own visual tokens (0 … n−1), not within the prompt. Every output slot is
    represented by one input token, whose place it takes; a new slot that only gathers others is represented by one of
    them.

    Attributes:
        keep: `(batch, m)` int64, the tokens that represent the output slots, ascending, `-1` after the end of a shorter
            row.
        size: `(batch,)` int64, how many visual tokens each sample had.
        asked: `(batch,)` int64, how many were to be kept; `-1` where a threshold decides the number.
        order: `(batch, m)` int64, the same tokens in the order in which they were chosen; None if there is no order.
        score: `(batch, n)` float32, what the tokens were ranked by; NaN beyond a sample's size; None if no ranking.
        slots: `(batch, m)` int64, the tokens of `keep` in the order in which the slots follow each other in the
            sequence; None: ascending.
        merge: what each slot is made of; None: its own token, unchanged.
        sizes: `(batch, m)` float32, how many patches each slot stands for, in the order of the slots; None: counted
            from
            `merge`, or 1.
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
    slots: Tensor | None = None
    merge: Merge | None = None
    sizes: Tensor | None = None
    notes: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def counts(self) -> Tensor:
        """`(batch,)` int64: how many tokens each sample keeps."""
        return (self.keep != PAD).sum(dim=1)

    def mask(self) -> Tensor:
        """`(batch, n)` bool: True where a visual token stays; n is the largest size in the batch."""
        return rows_to_mask(self.keep, int(self.size.max()) if len(self.size) else 0)

    @property
    def sequence(self) -> Tensor:
        """`(batch, m)` int64: the tokens that represent the slots, in the order of the output."""
        return self.keep if self.slots is None else self.slots

    def weights(self) -> Tensor:
        """`(batch, m, n)` float32: what each output slot is made of (rows of empty slots are 0)."""
        slots, tokens = self.keep.shape[1], int(self.size.max()) if len(self.size) else 0
        if self.merge is not None:
            return self.merge.dense(slots, tokens)
        own = torch.nn.functional.one_hot(self.sequence.clamp(min=0), max(tokens, 1)).float()[:, :, :tokens]
        return own * (self.sequence != PAD)[:, :, None]

    def members(self) -> Tensor:
        """`(batch, m, n)` bool: which input tokens went into each output slot."""
        return self.weights() != 0

    def slot_sizes(self, before: Tensor | None = None) -> Tensor:
        """`(batch, m)` float32: patches each slot stands for, its inputs `before` `(batch, n)` (None: 1 each)."""
        if self.sizes is not None:
            return self.sizes
        members = self.members().float()
        if before is None:
            return members.sum(dim=2)
        return (members @ before[:, : members.shape[2], None].float())[:, :, 0]

    def apply(self, states: Tensor) -> Tensor:
        """Reduce `(batch, n, channels)` → `(batch, m, channels)`; empty slots are 0."""
        if self.merge is not None:
            return self.merge.apply(states, self.keep.shape[1])
        return gather_tokens(states, self.sequence) * (self.sequence != PAD)[:, :, None]

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
        if self.keep.dtype != torch.int64 or self.keep.dim() != 2 or len(self.keep) != len(size):
            raise DartLabError(
                f"{method}: keep must be int64 (batch, m) with batch {len(size)}, got {self.keep.dtype} of shape "
                f"{tuple(self.keep.shape)}"
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
                    f"{method}: sample {row}: unsorted kept indices; return them in ascending order"
                )
        if self.slots is not None and not torch.equal(self.slots.sort(dim=1).values, self.keep.sort(dim=1).values):
            raise DartLabError(f"{method}: slots must hold the tokens of keep in another order, nothing else")
        if self.merge is not None and bool((self.merge.slot >= self.keep.shape[1]).any()):
            raise DartLabError(f"{method}: a merge entry goes to a slot beyond the {self.keep.shape[1]} there are")


def compose(second: Reduction, first: Reduction) -> Reduction:
    """One reduction that does what `first` and then `second` do; `second` reduces the slots of `first`.

    Raises `DartLabError` if `second` was not made for what `first` leaves.

    >>> first = Reduction.from_mask(torch.tensor([[True, False, True, True]]), torch.tensor([4]))
    >>> second = Reduction.from_mask(torch.tensor([[False, True, True]]), torch.tensor([3]))
    >>> compose(second, first).keep
    tensor([[2, 3]])
    """
    if not torch.equal(second.size.cpu(), first.counts.cpu()):
        raise DartLabError(
            f"cannot compose: the first leaves {first.counts.tolist()} tokens, the second is for {second.size.tolist()}"
        )

    def through(index: Tensor) -> Tensor:
        return first.sequence.gather(1, index.clamp(min=0)).masked_fill(index == PAD, PAD)

    sequence = through(second.sequence)
    merged = first.merge is not None or second.merge is not None
    sized = merged or first.sizes is not None or second.sizes is not None
    inner = second.weights()
    keep = torch.where(sequence == PAD, torch.iinfo(torch.int64).max, sequence).sort(dim=1).values
    return Reduction(
        keep=torch.where(keep == torch.iinfo(torch.int64).max, PAD, keep),
        size=first.size, asked=second.asked, slots=sequence,
        order=None if second.order is None else through(second.order),
        merge=Merge.from_dense(inner @ first.weights()[:, : inner.shape[2]]) if merged else None,
        sizes=second.slot_sizes(first.slot_sizes()) if sized else None,
        notes=second.notes,
    )


def gather_tokens(states: Tensor, index: Tensor) -> Tensor:
    """Pick tokens `(batch, m)` out of `(batch, n, channels)`; -1 gives token 0."""
    return torch.gather(states, 1, index.clamp(min=0)[:, :, None].expand(-1, -1, states.shape[2]))


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
