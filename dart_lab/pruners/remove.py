"""Removal: certain tokens go or lose their content, all others stay (EmbedLens, arXiv 2603.00510)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner, Stage
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.marked import ROLE, check_marking, marked, marked_numbers
from dart_lab.pruners.reduction import Merge, Reduction
from dart_lab.pruners.signals import Signals

How = Literal["drop", "mean", "group-mean", "zero"]
Where = Literal["layer", "input"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Remove(Pruner):
    """Take the marked tokens away.

    Args:
        mask: which visual tokens go, `(n,)` bool for every sample alike, or `(batch, n)`.
        role: in place of `mask`: a token role; asks for the signal "role:NAME", `(batch, sequence)` bool.
        how: "drop" (default): they leave the sequence, the others keep their positions; hiding them as keys from the
            same layer on gives the same answers. "mean": their states become the mean of all visual tokens of the
            sample; "group-mean": the mean of the marked ones; "zero": zero. With these the sequence keeps its length.
        where: "layer" (default): before decoder layer `layer`; "input": before the language model.

    Takes no `keep`. The reduction's note: `removed`, `(batch,)`, how many there were.
    Raises `DartLabError` if a budget is given, or for a mask of another length.

    >>> signals = Signals.of(visual=torch.arange(4)[None])
    >>> Remove(mask=torch.tensor([True, False, False, True]))(signals).keep
    tensor([[1, 2]])

    Differs from the official code in: batches; any layer; the released code drops before layer 0 only.
    """

    name: ClassVar[str] = "remove"

    mask: Tensor | None = None
    role: str | None = None
    how: How = "drop"
    where: Where = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_marking(self.name, self.mask, self.role)
        check_choice(self.name, "how", self.how, get_args(How))
        check_choice(self.name, "where", self.where, get_args(Where))
        if self.keep is not None:
            raise DartLabError(f"remove: keep={self.keep}: the marked tokens decide how many stay; leave keep out")

    def _needs_keep(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The role, where one is named."""
        return frozenset() if self.role is None else frozenset({f"{ROLE}{self.role}"})

    @property
    def stage(self) -> Stage:
        """Where the tokens are taken away."""
        return Stage("LLM_IN") if self.where == "input" else Stage("LLM_LAYER", self.layer)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Keep what is not marked; or keep all, and replace what is marked."""
        gone = marked(self.name, signals, self.mask, self.role)
        notes = {"removed": gone.sum(dim=1)}
        if self.how == "drop":
            return Reduction.from_mask(signals.valid & ~gone, signals.counts, asked=asked, notes=notes)
        whole = Reduction.from_mask(signals.valid, signals.counts, asked=asked)
        weights = torch.diag_embed((signals.valid & ~gone).float())
        if self.how != "zero":
            source = (gone if self.how == "group-mean" else signals.valid).float()
            share = source / source.sum(dim=1, keepdim=True).clamp(min=1)
            weights = weights + gone.float()[:, :, None] * share[:, None, :]
        return Reduction(
            keep=whole.keep, size=whole.size, asked=asked, merge=Merge.from_dense(weights),
            sizes=signals.valid.float(), notes=notes,
        )  # fmt: skip

    def parameters(self) -> dict[str, Any]:
        """The parameters as a plain dict; the mask as lists of removed tokens."""
        return {"keep": None, "layer": self.layer, "seed": self.seed, "budget": self.budget, "role": self.role,
                "how": self.how, "where": self.where, "mask": marked_numbers(self.mask)}  # fmt: skip
