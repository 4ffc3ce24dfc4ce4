"""The α-score: importance and uniqueness in one ranking (arXiv 2502.11501)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import ScorePruner
from dart_lab.pruners.fastv import FastV
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.selectors import min_max
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.uniqueness import Representation, Uniqueness
from dart_lab.pruners.wrappers import check_ranks, check_wraps, parameters


@dataclass(frozen=True, kw_only=True)
class Alpha(ScorePruner):
    """Rank by α · importance + (1 − α) · uniqueness, each scaled to [0, 1] over the sample's visual tokens.

    A term that is the same for all tokens counts 0. At α = 1 and α = 0 the decision is that of the one method, to the
    last bit, and the other is not asked for anything.

    Args:
        importance: a method that ranks tokens; None: `FastV`.
        redundancy: a method that ranks tokens, the unlike ones first; None: `Uniqueness`.
        alpha: weight of importance, from 0 to 1. Default 0.5.
        representation: what `Uniqueness` compares, see there; only without `redundancy`.
        keep, layer, seed, budget: of the mixture; the defaults of the pair follow them. Methods that are given must act
            at the same layer; their own `keep` serves if none is given here.

    Raises `DartLabError` for α outside [0, 1], methods without scores, and methods at another stage.

    >>> import torch
    >>> states = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    >>> row = torch.tensor([0.6, 0.1, 0.3]).expand(1, 1, 3, 3)
    >>> signals = Signals.of(visual=torch.tensor([[0, 1]]), hidden=states, attention=row)
    >>> Alpha(keep=1, alpha=0.9)(signals).keep, Alpha(keep=1, alpha=0.1)(signals).keep
    (tensor([[0]]), tensor([[1]]))

    Differs from the official code in: none was released. Layer and representation are this package's choice.
    """

    name: ClassVar[str] = "alpha"
    paper: ClassVar[str] = "Token Pruning in Multimodal LLMs: Are We Solving the Right Problem?, arXiv 2502.11501"

    importance: ScorePruner | None = field(default=None, kw_only=False)
    redundancy: ScorePruner | None = field(default=None, kw_only=False)
    alpha: float = 0.5
    representation: Representation = "hidden"

    def __post_init__(self) -> None:
        given = [method for method in (self.importance, self.redundancy) if method is not None]
        for method in given:
            check_wraps(self.name, method)
            check_ranks(self.name, method)
        if self.keep is None and given:
            object.__setattr__(self, "keep", given[0].keep)
        super().__post_init__()
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise DartLabError(f"alpha: alpha={self.alpha!r}: give the weight of importance, from 0 to 1")
        for method in given:
            if method.stage != self.stage:
                raise DartLabError(
                    f"alpha: acts at layer {self.layer}, {method.name} at {method.stage.kind} {method.stage.layer}; "
                    "give both the same layer"
                )
        if self.redundancy is not None and self.representation != "hidden":
            raise DartLabError(f"alpha: representation={self.representation!r} belongs to the default redundancy")
        self.pair()

    def pair(self) -> tuple[ScorePruner, ScorePruner]:
        """Importance and redundancy, defaults filled in."""
        shared: dict[str, Any] = {"keep": self.keep, "layer": self.layer, "seed": self.seed, "budget": self.budget}
        return (
            self.importance or FastV(**shared),
            self.redundancy or Uniqueness(**shared, representation=self.representation),
        )

    def weighted(self) -> list[tuple[float, ScorePruner]]:
        """The methods that count, with their weights."""
        importance, redundancy = self.pair()
        return [(w, m) for w, m in ((self.alpha, importance), (1 - self.alpha, redundancy)) if w > 0]

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The signals of the methods that count."""
        return frozenset().union(*(method.needs for _, method in self.weighted()))

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens to keep, rounded as the importance method rounds."""
        return self.pair()[0].asked(signals) if self.importance is None else super().asked(signals)

    def score(self, signals: Signals) -> Tensor:
        """`(batch, n)` in [0, 1]."""
        terms = [w * min_max(method.score(signals), signals.valid) for w, method in self.weighted()]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """The best by score; at the ends of α by the one method's own, since scaling may round two scores into one."""
        methods = self.weighted()
        if len(methods) > 1:
            return super().reduce(signals, asked)
        end = methods[0][1].reduce(signals, asked)
        return dataclasses.replace(end, score=self.score(signals).masked_fill(~signals.valid, float("nan")))

    def parameters(self) -> dict[str, Any]:
        """The parameters as a plain dict, given methods with their names."""
        return parameters(self)
