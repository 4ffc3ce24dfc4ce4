"""Two methods as one: what either keeps, or one after the other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.reduction import PAD, Reduction, compose
from dart_lab.pruners.selectors import ascending, padding_last
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.wrappers import check_wraps, dropping_only, narrowed, parameters


@dataclass(frozen=True, kw_only=True)
class _Two(Pruner):
    """Two methods at one stage; `keep`, `layer`, `seed` and `budget` are theirs."""

    verb: ClassVar[str]

    first: Pruner = field(kw_only=False)
    second: Pruner = field(kw_only=False)
    keep: int | float | None = field(init=False, repr=False, default=None)
    layer: int = field(init=False, repr=False, default=2)
    seed: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        for method in (self.first, self.second):
            check_wraps(self.verb, method)
        object.__setattr__(self, "layer", self.first.layer)
        super().__post_init__()
        if self.first.stage != self.second.stage:
            raise DartLabError(f"{self.name}: {_where(self.first)}, {_where(self.second)}; give both the same layer")
        if self.first.positions != self.second.positions:
            raise DartLabError(
                f"{self.name}: {self.first.name} wants {self.first.positions} positions, {self.second.name} "
                f"{self.second.positions} ones; they cannot share a stage"
            )

    def _needs_keep(self) -> bool:
        return False

    @property
    def name(self) -> str:  # type: ignore[override]
        """Both names."""
        return f"{self.first.name}-{self.verb}-{self.second.name}"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The signals of both."""
        return self.first.needs | self.second.needs

    @property
    def positions(self) -> PositionPolicy:  # type: ignore[override]
        """The policy that both have."""
        return self.first.positions

    @property
    def stage(self) -> Stage:
        """Where both act."""
        return self.first.stage

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: -1, the two methods decide."""
        return torch.full_like(signals.counts, PAD)

    def parameters(self) -> dict[str, Any]:
        """The parameters as a plain dict, both methods with their names."""
        return parameters(self)


@dataclass(frozen=True, kw_only=True)
class Union(_Two):
    """Keep what at least one of two methods keeps; how many that is, their overlap decides.

    Args:
        first, second: methods at the same stage that drop tokens.

    The reduction's note `overlap` is `(batch,)`: tokens that both keep.
    Raises `DartLabError` for different stages or position policies, and for methods that merge.

    >>> from dart_lab.pruners import FastV, UniformGrid
    >>> row = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(1, 1, 4, 4)
    >>> signals = Signals.of(visual=torch.arange(4)[None], attention=row)
    >>> Union(FastV(keep=2), UniformGrid(keep=2))(signals).keep
    tensor([[0, 1, 3]])
    """

    verb: ClassVar[str] = "or"

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Both decide by themselves."""
        methods = (self.first, self.second)
        one, two = (dropping_only(self.name, m.reduce(signals, m.asked(signals))) for m in methods)
        both = one.mask() & two.mask()
        kept, added = ((r.keep if r.order is None else r.order) for r in (one, two))
        added = added.masked_fill(one.mask().gather(1, added.clamp(min=0)), PAD)
        order = padding_last(torch.cat([kept, added], dim=1))
        return Reduction(
            keep=ascending(order), size=signals.counts, asked=asked, order=order, notes={"overlap": both.sum(dim=1)},
        )


@dataclass(frozen=True, kw_only=True)
class Then(_Two):
    """Let a second method choose, at the same stage, among what a first one keeps.

    For methods at different stages, see `Schedule`. A ratio of the second method is a share of what the first leaves.

    Args:
        first: a method that drops tokens.
        second: any method at the same stage; states and attention it looks at are those computed with all tokens.

    Raises `DartLabError` for different stages or position policies, and if the first method merges.

    >>> from dart_lab.pruners import FastV, UniformGrid
    >>> row = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(1, 1, 4, 4)
    >>> signals = Signals.of(visual=torch.arange(4)[None], attention=row)
    >>> Then(UniformGrid(keep=2), FastV(keep=0.5))(signals).keep
    tensor([[1]])
    """

    verb: ClassVar[str] = "then"

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: what the second is asked for; -1 if that depends on what the first decides."""
        first = self.first.asked(signals)
        if "official" in (self.first.budget, self.second.budget) or bool((first == PAD).any()):
            return super().asked(signals)
        place = torch.arange(signals.visual.shape[1], device=first.device)
        return self.second.asked(narrowed(signals, place < first[:, None]))  # which ones stay makes no difference

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """The second decides on the rest of the first."""
        first = dropping_only(self.name, self.first.reduce(signals, self.first.asked(signals)))
        rest = narrowed(signals, first.mask())
        wanted = self.second.asked(rest)
        second = self.second.reduce(rest, wanted)
        return dataclasses.replace(compose(second, first), asked=wanted)


def _where(method: Pruner) -> str:
    return f"{method.name} acts at {method.stage.kind} {method.stage.layer}"
