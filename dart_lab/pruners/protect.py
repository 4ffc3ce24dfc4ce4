"""Protection: certain tokens stay, the method chooses among the others (role protection, arXiv 2608.04483)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.marked import ROLE, check_marking, marked, marked_numbers
from dart_lab.pruners.reduction import PAD, Reduction, mask_to_rows, rows_to_mask
from dart_lab.pruners.selectors import ascending, padding_last
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.wrappers import Wrapper, dropping_only, narrowed, through

Overflow = Literal["rank", "soft", "additive"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Protect(Wrapper):
    """Always keep the protected tokens.

    The method decides as it would without protection; protected tokens it dropped are swapped in for those it chose
    last (by index, if it has no order). For a method that ranks tokens this is: the protected, then the best others.

    Args:
        pruner: any method that drops tokens.
        mask: which visual tokens are protected, `(n,)` bool for every sample alike, or `(batch, n)`.
        role: in place of `mask`: a token role; asks for the signal "role:NAME", `(batch, sequence)` bool.
        overflow: what happens when more are protected than may be kept, and to the budget. "rank" (default): the number
            kept is the method's; if the protected exceed it, the method chooses among them. "soft": all protected stay,
            and as many others as fit, possibly none; the number may exceed the budget. "additive": what the method
            keeps without protection, and all protected; the number exceeds the budget by those it had dropped.

    The reduction's notes: `protected`, `(batch,)`, how many there are; `already`, `(batch,)`, how many of them the
    method keeps by itself (all of them: protection changes nothing).
    Raises `DartLabError` for a mask of another length, for methods that merge tokens, and where the method cannot
    choose among the protected.

    >>> from dart_lab.pruners import FastV
    >>> row = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(1, 1, 4, 4)
    >>> signals = Signals.of(visual=torch.arange(4)[None], attention=row)
    >>> Protect(FastV(keep=2), mask=torch.tensor([False, False, False, True]))(signals).keep
    tensor([[0, 3]])

    Differs from the official code in: none was released; the paper does not say what happens to the budget.
    """

    verb: ClassVar[str] = "protect"

    mask: Tensor | None = None
    role: str | None = None
    overflow: Overflow = "rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_marking(self.name, self.mask, self.role)
        check_choice(self.name, "overflow", self.overflow, get_args(Overflow))

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The signals of the wrapped method, and the role."""
        return self.pruner.needs | ({f"{ROLE}{self.role}"} if self.role is not None else frozenset())

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: what the method is asked for; -1 where protection may exceed it."""
        asked = self.pruner.asked(signals)
        return asked if self.overflow == "rank" else torch.full_like(asked, PAD)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Let the method decide, then swap the protected in."""
        wanted = torch.where(asked == PAD, self.pruner.asked(signals), asked)
        plain = dropping_only(self.name, self.pruner.reduce(signals, wanted))
        protected, budget = self.protected(signals), plain.counts
        fits = (protected.sum(dim=1) <= budget)[:, None]
        stay = protected
        if self.overflow == "rank" and not bool(fits.all()):
            stay = protected & (fits | self._among(signals, torch.where(fits, signals.valid, protected), budget))

        others = plain.keep if plain.order is None else plain.order
        others = padding_last(others.masked_fill(stay.gather(1, others.clamp(min=0)), PAD))
        spare = budget if self.overflow == "additive" else budget - stay.sum(dim=1)
        others = torch.where(torch.arange(others.shape[1], device=others.device) < spare[:, None], others, PAD)
        order = padding_last(torch.cat([mask_to_rows(stay), others], dim=1))
        already = (protected & plain.mask()).sum(dim=1)
        return Reduction(
            keep=ascending(order), size=signals.counts, asked=wanted, order=order, score=plain.score,
            notes={**plain.notes, "protected": protected.sum(dim=1), "already": already},
        )

    def _among(self, signals: Signals, pool: Tensor, budget: Tensor) -> Tensor:
        """`(batch, n)` bool: the `budget` tokens that the method keeps where `pool` is all there is."""
        kept = dropping_only(self.name, self.pruner.reduce(narrowed(signals, pool), budget))
        if not torch.equal(kept.counts, budget):
            raise DartLabError(
                f"{self.name}: {pool.sum(dim=1).tolist()} tokens are protected, {budget.tolist()} may stay, and "
                f"{self.pruner.name} cannot choose that many among them; give overflow='soft'"
            )
        return rows_to_mask(through(mask_to_rows(pool), kept.keep), pool.shape[1])

    def protected(self, signals: Signals) -> Tensor:
        """`(batch, n)` bool: the protected tokens."""
        return marked(self.name, signals, self.mask, self.role)

    def parameters(self) -> dict[str, Any]:
        """The parameters as a plain dict; the mask as lists of protected tokens."""
        return {**super().parameters(), "mask": marked_numbers(self.mask)}
