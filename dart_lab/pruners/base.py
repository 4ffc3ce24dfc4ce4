"""What every method is: a frozen dataclass of its parameters, a stage, and one method that decides."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.pruners.budget import check_keep, resolve_keep
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.selectors import ascending, top_k
from dart_lab.pruners.signals import Signals

BudgetMode = Literal["exact", "official"]


StageKind = Literal["VIT_BLOCK", "VISION_OUT", "PROJECTED", "LLM_IN", "LLM_LAYER", "POST_PREFILL_CACHE"]
PositionPolicy = Literal["original", "compact"]


@dataclass(frozen=True)
class Stage:
    """Where a method acts.

    `VIT_BLOCK` inside vision block `layer`, between attention and MLP; `VISION_OUT` on the features the tower hands to
    the projector, with its class token if it has one; `PROJECTED` on the projected features of each crop; `LLM_IN` on
    the packed input embeddings; `LLM_LAYER` before decoder layer `layer`, looking at the layer before it;
    `POST_PREFILL_CACHE` on every layer's KV cache once the prompt has run.
    """

    kind: StageKind
    layer: int = 0


@dataclass(frozen=True, kw_only=True)
class Pruner(ABC):
    """A method that decides which visual tokens stay.

    Args:
        keep: visual tokens to keep in each sample: a whole number, or a retention ratio in (0, 1].
        layer: K, the first decoder layer that runs on the short sequence (0-based, at least 1). Default 2.
        seed: for methods that draw. Same seed and sample, same kept set, whatever the batch.
        budget: "exact" keeps what was asked; "official" what the authors' released code keeps (see each method).

    Subclasses set `name`, `needs` (names of the signals they ask for) and implement `reduce`; where it is not the
    default, they also set `positions`: "original" (every token keeps its rotary position) or "compact" (renumbered
    without gaps); `keeps_cls`: in the vision tower, the class token is one of the visual tokens (default: only patches
    are); `proportional`: later vision blocks add log size to their attention; `whole_cache`: in the KV cache, text
    is reduced like visual tokens. Raises `DartLabError` for parameters out of range.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    positions: ClassVar[PositionPolicy] = "original"
    keeps_cls: ClassVar[bool] = False
    proportional: ClassVar[bool] = False
    whole_cache: ClassVar[bool] = False
    paper: ClassVar[str] = ""

    keep: int | float | None = None
    layer: int = 2
    seed: int = 0
    budget: BudgetMode = "exact"

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_keep(self.keep)
        elif self._needs_keep():
            raise DartLabError(f"{self.name}: keep is missing; give keep=128 (tokens) or keep=0.25 (retention ratio)")
        check_whole(f"{self.name}: layer", self.layer, least=1, hint="pruning at K ≥ 1 looks at layer K-1")
        check_whole(f"{self.name}: seed", self.seed)
        if self.budget not in ("exact", "official"):
            raise DartLabError(f"{self.name}: budget={self.budget!r}: expected 'exact' or 'official'")

    def _needs_keep(self) -> bool:
        return True

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("LLM_LAYER", self.layer)

    def parts(self) -> tuple[Pruner, ...]:
        """The single-stage methods this one consists of, in the order of their stages; itself, if it has one stage."""
        return (self,)

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens to keep in each sample; -1 where `keep` is None and the method decides."""
        if self.keep is None:
            return torch.full_like(signals.counts, PAD)
        return resolve_keep(self.keep, signals.counts)

    @abstractmethod
    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Decide for a batch. `asked` is `(batch,)` int64, the tokens to keep; -1 where the method decides how many."""

    def __call__(self, signals: Signals) -> Reduction:
        """Decide for a batch and check the decision: sorted, unique, inside the image, budget as promised."""
        asked = self.asked(signals)
        with torch.no_grad():
            reduction = self.reduce(signals, asked)
        if not isinstance(reduction, Reduction):
            raise DartLabError(f"{self.name}: reduce returned a {type(reduction).__name__}; return a Reduction")
        reduction.check(size=signals.counts, method=self.name)
        promised = asked if self.budget == "exact" else torch.full_like(asked, PAD)
        if bool(((promised != PAD) & (reduction.counts != promised)).any()):
            raise DartLabError(
                f"{self.name}: wrong count: asked to keep {asked.tolist()}, kept {reduction.counts.tolist()}"
            )
        return reduction

    def parameters(self) -> dict[str, Any]:
        """The parameters as a plain dict, for records."""
        return dataclasses.asdict(self)


class ScorePruner(Pruner):
    """A method that ranks tokens: implements `score`; the best stay, equal scores go to the lower index."""

    @abstractmethod
    def score(self, signals: Signals) -> Tensor:
        """`(batch, n)`: higher is kept first."""

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        score = self.score(signals).float()
        if score.shape != signals.visual.shape:
            raise DartLabError(
                f"{self.name}: score has shape {tuple(score.shape)}, expected {tuple(signals.visual.shape)} (batch, n)"
            )
        order = top_k(score, asked, signals.valid)
        return Reduction(
            keep=ascending(order), size=signals.counts, asked=asked, order=order,
            score=score.masked_fill(~signals.valid, float("nan")),
        )
