"""DivPrune: keep the visual tokens that lie farthest from each other (arXiv 2503.02175)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.diversity import cosine_distance, farthest_point
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.selectors import ascending
from dart_lab.pruners.signals import Signals, gather_tokens

Where = Literal["LLM_IN", "PROJECTED", "LLM_LAYER"]


@dataclass(frozen=True, kw_only=True)
class DivPrune(Pruner):
    """Greedy max–min diversity: the most isolated token first, then always the one farthest from those taken.

    Args:
        keep: visual tokens to keep, or retention ratio.
        where: "LLM_IN": among all visual tokens of the prompt, newline tokens included (default, the released code);
            "PROJECTED": in each crop by itself; "LLM_LAYER": before decoder layer `layer` (also in the paper).
        budget: "exact" rounds a ratio half up, "official" half to even.

    Distances are 1 − cosine, in float32. The smallest distance between kept tokens, as a chord √(2(1 − cosine)), is at
    least half of the best that any choice of as many tokens could have. The note `reach` is `(batch, m)`: the distance
    at which each token of `order` was taken.

    >>> import torch
    >>> states = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
    >>> DivPrune(keep=2)(Signals.of(visual=torch.tensor([[0, 1, 2]]), hidden=states)).keep
    tensor([[0, 2]])

    Differs from the official code in: a token that was taken cannot be taken again (there, duplicates and rounding can
    repeat tokens in the sequence); distances in float32, not in the model's dtype, those below 1e-6 being 0; any span,
    several images, any batch size.
    """

    name: ClassVar[str] = "divprune"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    paper: ClassVar[str] = "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models"

    where: Where = "LLM_IN"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "where", self.where, get_args(Where))

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage(self.where, self.layer if self.where == "LLM_LAYER" else 0)

    @property
    def positions(self) -> PositionPolicy:  # type: ignore[override]
        """Before the LLM the sequence is simply shorter; inside it tokens keep their places."""
        return "original" if self.where == "LLM_LAYER" else "compact"

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens to keep in each sample."""
        if self.budget == "official" and isinstance(self.keep, float):
            return (signals.counts.double() * self.keep).round().long()
        return super().asked(signals)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Spread the kept tokens out over the feature space."""
        tokens = gather_tokens(signals.get("hidden"), signals.visual)
        order, reach = farthest_point(cosine_distance(tokens), asked, signals.valid)
        return Reduction(
            keep=ascending(order), size=signals.counts, asked=asked, order=order, notes={"reach": reach}
        )
