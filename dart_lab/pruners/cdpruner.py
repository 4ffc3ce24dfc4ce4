"""CDPruner: patches that are relevant to the question and unlike each other, by a DPP (arXiv 2506.10967)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.diversity import dpp_map
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.selectors import ascending, cosine
from dart_lab.pruners.signals import Signals, gather_tokens


@dataclass(frozen=True, kw_only=True)
class CDPruner(Pruner):
    """Greedy most probable subset of the determinantal point process diag(r) · cosine · diag(r).

    r is the relevance of each patch to the question, scaled to [0, 1] over the crops of an image: the negated cosine in
    CLIP's shared space, since there the background resembles a text more than what it speaks of does. The cosines of
    the kernel are those of the projected features.

    Args:
        keep: patches to keep in each crop, or retention ratio.
        theta: weight of relevance, in [0, 1): r becomes exp(theta / (2·(1 − theta)) · r). None (default, as released):
            r itself.
        per_crop: scale r over each crop by itself instead of over all crops of the image. Default False.

    Where all patches are equally relevant r is 1 and diversity decides alone. The note `gain` is `(batch, m)`: the
    factor by which each token of `order` multiplied the determinant.
    Raises `DartLabError` where the model has no text tower beside its vision tower (signal `relevance`).

    >>> states, text = torch.eye(3)[None], torch.tensor([[0.1, 0.3, 0.2]])
    >>> CDPruner(keep=2)(Signals.of(visual=torch.tensor([[0, 1, 2]]), hidden=states, relevance=text)).order
    tensor([[0, 2]])

    Differs from the official code in: scaling never mixes images; equal relevance and exhausted kernels give no NaN.
    """

    name: ClassVar[str] = "cdpruner"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden", "relevance"})
    positions: ClassVar[PositionPolicy] = "compact"
    paper: ClassVar[str] = "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs"

    theta: float | None = None
    per_crop: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta is not None and (isinstance(self.theta, bool) or not 0 <= self.theta < 1):
            raise DartLabError(f"{self.name}: theta={self.theta!r}: give a weight in [0, 1), or None")

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("PROJECTED")

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Weigh likeness by relevance and take the most probable subset."""
        relevance = self.relevance(signals)
        if self.theta is not None:
            relevance = (self.theta / (2 * (1 - self.theta)) * relevance).exp()
        tokens = gather_tokens(signals.get("hidden"), signals.visual)
        kernel = relevance[:, :, None] * cosine(tokens, tokens) * relevance[:, None, :]
        order, gain = dpp_map(kernel, asked, signals.valid)
        return Reduction(
            keep=ascending(order), size=signals.counts, asked=asked, order=order,
            score=relevance.masked_fill(~signals.valid, math.nan), notes={"gain": gain},
        )

    def relevance(self, signals: Signals) -> Tensor:
        """`(batch, n)` float32: relevance of each patch, from 0 to 1 over its image (or crop)."""
        if "relevance" not in signals.providers:
            raise DartLabError(
                f"{self.name}: needs the likeness of every patch to the question (signal 'relevance'), and this model "
                "has no text tower beside its vision tower; divprune and fastervlm do without"
            )
        relevant = -signals.get("relevance").float().gather(1, signals.visual.clamp(min=0))
        low = torch.where(signals.valid, relevant, torch.inf).amin(dim=1)
        high = torch.where(signals.valid, relevant, -torch.inf).amax(dim=1)
        if signals.image is not None and not self.per_crop:
            together = signals.image[:, None] == signals.image
            low = torch.where(together, low, torch.inf).amin(dim=1)
            high = torch.where(together, high, -torch.inf).amax(dim=1)
        span = (high - low)[:, None]
        scaled = (relevant - low[:, None]) / span.clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(span > 0, scaled, 1.0)
