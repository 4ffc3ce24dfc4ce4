"""From a decision to a shorter sequence: which slot holds which token, and what is done to states and positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dart_lab.pruners.reduction import PAD, Reduction, gather_tokens, mask_to_rows


@dataclass(eq=False)
class Cut:
    """The sequence as it runs from one layer on.

    Attributes:
        layer: the first layer that runs on it.
        rows: `(batch, m)` tokens of this pass that the slots stand for, right-aligned, -1 for the empty slots of
            samples that keep fewer.
        local: the same counted within the sequence before the cut.
        hollow: there are empty slots.
        ordered: the slots follow the order of the prompt, so its causal mask can be gathered.
        compact: rotary positions are renumbered without gaps.
        merge: states before the cut `(batch, n, channels)` and gathered ones `(batch, m, channels)` → merged ones.
    """

    layer: int
    rows: Tensor
    local: Tensor
    hollow: bool
    ordered: bool = True
    compact: bool = False
    merge: Callable[[Tensor, Tensor], Tensor] | None = None

    def states(self, before: Tensor) -> Tensor:
        """Hidden states `(batch, n, channels)` → `(batch, m, channels)`."""
        short = gather_along(before, self.local, dim=1)
        return short if self.merge is None else self.merge(before, short)

    def extended(self, new: Tensor, slots: int, before: int) -> Cut:
        """The same cut with tokens `new` `(k,)` behind; before it there were `slots` slots for `before` tokens."""
        later = new.to(self.rows.device).expand(self.rows.shape[0], -1)
        local = torch.cat([self.local, later - before + slots], dim=1)
        merge = self.merge
        return Cut(
            self.layer,
            torch.cat([self.rows, later], dim=1),
            local,
            self.hollow,
            self.ordered,
            self.compact,
            None
            if merge is None
            else lambda states, short: torch.cat(
                [merge(states[:, :slots], short[:, : -len(new)]), short[:, -len(new) :]], dim=1
            ),
        )

    def scatter(self, states: Tensor, length: int) -> Tensor:
        """Put the short sequence back into its full length; dropped tokens get 0."""
        rows = self.rows.to(states.device)
        full = states.new_zeros(states.shape[0], length + 1, states.shape[2])
        index = torch.where(rows == PAD, length, rows)[:, :, None].expand(-1, -1, states.shape[2])
        return full.scatter(1, index, states)[:, :length]

    def dropped(self, length: int) -> Tensor:
        """`(batch,)` int64: how many of `length` tokens each sample lost."""
        return length - (self.rows != PAD).sum(dim=1)


def make_cut(
    reduction: Reduction, *, layer: int, rows: Tensor, visual: Tensor, positions: Tensor, compact: bool
) -> Cut:
    """Turn a decision about the visual tokens into a cut of the whole sequence.

    Args:
        reduction: the decision about the `n` visual tokens.
        layer: the first layer that runs short.
        rows: `(batch, s)` what the sequence before the cut stands for, -1 for empty slots.
        visual: `(batch, s)` bool, its visual tokens.
        positions: `(batch, n)` where in that sequence each visual token is, -1 after the end.
        compact: renumber rotary positions.
    """
    sequence = reduction.sequence.to(rows.device)
    chosen = positions.gather(1, sequence.clamp(min=0)).masked_fill(sequence == PAD, PAD)
    kept = torch.zeros(visual.shape[0], visual.shape[1] + 1, dtype=torch.bool, device=rows.device)
    kept.scatter_(1, chosen.where(chosen != PAD, visual.shape[1]), True)
    local = right_align((rows != PAD) & (~visual | kept[:, :-1]))
    places = mask_to_rows(visual.gather(1, local.clamp(min=0)) & (local != PAD))  # slots of the visual tokens
    if reduction.slots is not None:  # visual slots follow each other in the method's order
        spare = torch.cat([local, local[:, :1]], dim=1)
        spare.scatter_(1, places.where(places != PAD, local.shape[1]), chosen)
        local = spare[:, :-1]
    hollow = local == PAD
    new_rows = rows.gather(1, local.clamp(min=0)).masked_fill(hollow, PAD)
    merge = None
    if reduction.merge is not None:

        def merge(before: Tensor, short: Tensor) -> Tensor:
            merged = reduction.apply(gather_tokens(before, positions.to(before.device)))
            spare = torch.cat([short, short[:, :1]], dim=1)
            index = (
                places.where(places != PAD, short.shape[1]).to(short.device)[:, :, None].expand(-1, -1, short.shape[2])
            )
            return spare.scatter(1, index, merged)[:, :-1]

    ordered = reduction.slots is None or bool((new_rows[:, 1:] >= new_rows[:, :-1]).all())
    return Cut(layer, new_rows, local, bool(hollow.any()), ordered, compact, merge)


def select_positions(value: Any, rows: Tensor) -> Any:
    """Pick the kept rows out of (cos, sin) `(batch | 1, n, d)` or position ids `(…, batch | 1, n)`."""
    if isinstance(value, (tuple, list)):
        return type(value)(gather_along(part, rows, dim=-2) for part in value)
    return gather_along(value, rows, dim=-1)


def gather_along(tensor: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Gather `rows` `(batch, m)` along `dim`; the axis before it is the batch (1 or batch long); -1 gives row 0."""
    dim %= tensor.dim()
    full = list(tensor.shape)
    full[dim - 1] = rows.shape[0]
    short = list(full)
    short[dim] = rows.shape[1]
    index = rows.clamp(min=0).view([rows.shape[i - dim + 1] if i in (dim - 1, dim) else 1 for i in range(tensor.dim())])
    return torch.gather(tensor.expand(full), dim, index.expand(short))


def right_align(keep: Tensor) -> Tensor:
    """`(batch, n)` bool → `(batch, m)` ascending indices, padding (-1) in front: the last slot is the last token."""
    index = mask_to_rows(keep)
    counts = (index != PAD).sum(dim=1, keepdim=True)
    slot = torch.arange(index.shape[1], device=index.device) - (index.shape[1] - counts)
    return torch.where(slot < 0, PAD, index.gather(1, slot.clamp(min=0)))
