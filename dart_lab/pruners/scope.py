"""SCOPE: patches that cover the others and that the class token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.class_token import NEEDS, class_attention, class_token_note
from dart_lab.pruners.diversity import facility_location
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.selectors import ascending, cosine
from dart_lab.pruners.signals import Signals, gather_tokens


@dataclass(frozen=True, kw_only=True)
class SCOPE(Pruner):
    """Greedy facility location on cosines of the tower's features, each gain times (class-token attention)^alpha.

    Args:
        keep: patches to keep in each crop, or retention ratio.
        alpha: exponent of the attention; 0 is coverage alone. Default 1.

    Notes: `gain` `(batch, m)`, the weighted gain of each token of `order`; `class_token`, see `FasterVLM`.
    Raises `DartLabError` for a negative alpha.

    >>> states = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    >>> signals = Signals.of(visual=torch.tensor([[1, 2, 3]]), hidden=states, class_token=torch.tensor([0]),
    ...                      attention=torch.full((1, 1, 4, 4), 0.25))
    >>> SCOPE(keep=2)(signals).order
    tensor([[0, 2]])

    Differs from the official code in: it does not run as published, so this follows its description; coverage starts at
    0, which is this package's choice.
    """

    name: ClassVar[str] = "scope"
    needs: ClassVar[frozenset[str]] = NEEDS | {"hidden"}
    positions: ClassVar[PositionPolicy] = "compact"
    paper: ClassVar[str] = "SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodal LLMs"

    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not 0 <= self.alpha < float("inf"):
            raise DartLabError(f"{self.name}: alpha={self.alpha!r}: give an exponent, 0 or more")

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("VISION_OUT")

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Cover the crop, salient patches first."""
        salience = class_attention(signals)
        tokens = gather_tokens(signals.get("hidden"), signals.visual)
        order, gain = facility_location(
            cosine(tokens, tokens), asked, signals.valid, weight=salience.pow(self.alpha)
        )
        return Reduction(
            keep=ascending(order), size=signals.counts, asked=asked, order=order,
            score=salience.masked_fill(~signals.valid, torch.nan),
            notes={"gain": gain, **class_token_note(signals)},
        )
