"""V2Drop: drop the visual tokens that a layer changed least (Variation-aware Vision Token Dropping, CVPR 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner, ScorePruner
from dart_lab.pruners.signals import Signals, gather_tokens
from dart_lab.pruners.staged import Staged

PUBLISHED_LAYERS, PUBLISHED_SHARES = (3, 17, 22), (0.5, 0.5, 0.0)


@dataclass(frozen=True, kw_only=True)
class V2Drop(Staged):
    """Cuts inside the language model by how far the layer before moved each token; no attention is looked at.

    Args:
        keep: one cut, at the first of `layers`, to this number or share.
        schedule: in place of `keep`, the share of the tokens still there that each of `layers` keeps, rounded down, at
            least 1 token. Without both: (0.5, 0.5, 0).
        layers: decoder layers before which tokens are dropped. Default (3, 17, 22), with `keep` the base class's
            `layer`.

    >>> [(part.layer, part.keep, part.share) for part in V2Drop().parts()]
    [(3, None, 0.5), (17, None, 0.5), (22, None, 0.0)]
    >>> [(part.layer, part.keep) for part in V2Drop(keep=64, layer=4).parts()]
    [(4, 64)]

    Differs from the official code in: the image is where it is, not at 35 to 610; short prompts are pruned too; ties go
    to the lower index.
    """

    name: ClassVar[str] = "v2drop"
    paper: ClassVar[str] = "Variation-aware Vision Token Dropping for Faster Large Vision-Language Models"

    schedule: tuple[float, ...] | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and (self.schedule is not None or self.layers is not None):
            raise DartLabError("v2drop: give keep and layer (one cut), or schedule and layers (several), not both")
        shares, layers = self.schedule or PUBLISHED_SHARES, self.layers or PUBLISHED_LAYERS
        if len(shares) != len(layers) or list(layers) != sorted(set(layers)):
            raise DartLabError(f"v2drop: layers={layers} and schedule={shares}: give as many of both, layers rising")
        if not all(0 <= share <= 1 for share in shares):
            raise DartLabError(f"v2drop: schedule={shares}: shares of the tokens still there lie in [0, 1]")

    def _needs_keep(self) -> bool:
        return False

    def parts(self) -> tuple[Pruner, ...]:
        """One cut a layer."""
        if self.keep is not None:
            return (V2DropStage(keep=self.keep, layer=self.layer, budget=self.budget),)
        pairs = zip(self.schedule or PUBLISHED_SHARES, self.layers or PUBLISHED_LAYERS, strict=True)
        return tuple(V2DropStage(share=share, layer=layer, budget=self.budget) for share, layer in pairs)


@dataclass(frozen=True, kw_only=True)
class V2DropStage(ScorePruner):
    """One cut of `V2Drop`: the tokens that layer K−1 moved furthest stay.

    Args:
        keep: tokens or retention ratio; or
        share: of the tokens still there, rounded down, at least 1.

    >>> delta = torch.tensor([[[0.1], [-3.0], [2.0]]])
    >>> V2DropStage(keep=2)(Signals.of(visual=torch.tensor([[0, 1, 2]]), delta=delta)).keep
    tensor([[1, 2]])
    """

    name: ClassVar[str] = "v2drop-stage"
    needs: ClassVar[frozenset[str]] = frozenset({"delta"})

    share: float | None = None

    def _needs_keep(self) -> bool:
        return self.share is None

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64."""
        if self.share is None:
            return super().asked(signals)
        return (signals.counts.double() * self.share).floor().long().clamp(min=1)

    def score(self, signals: Signals) -> Tensor:
        """`(batch, n)`: L2 norm of what layer K−1 added."""
        return torch.linalg.vector_norm(gather_tokens(signals.get("delta"), signals.visual).float(), dim=-1)
