"""VLA-Pruner: what the prompt looks at, and what earlier actions looked at (vision-language-action models)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.diversity import cosine_distance, farthest_point
from dart_lab.pruners.reduction import Reduction, rows_to_mask
from dart_lab.pruners.selectors import ascending, top_k
from dart_lab.pruners.signals import Signals, gather_tokens

Semantic = Literal["mean", "last", "text"]


@dataclass(eq=False)
class ActionHistory:
    """Attention of the last control steps' action tokens to the visual tokens. Yours: one for an episode.

    Args:
        window: w, steps that are remembered, and unpruned steps at the start. Default 3.
        decay: γ, weight of a step against the one after it. Default 0.8.

    >>> history = ActionHistory(window=2, decay=0.5)
    >>> history.push(torch.tensor([[1.0, 0.0]]))
    >>> history.warm, history.push(torch.tensor([[0.0, 1.0]])), history.warm
    (False, None, True)
    >>> history.predict()
    tensor([[0.3333, 0.6667]])
    """

    window: int = 3
    decay: float = 0.8
    steps: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 < self.decay <= 1:
            raise DartLabError(f"window={self.window}, decay={self.decay}: give a window ≥ 1 and a decay in (0, 1]")

    def push(self, attention: Tensor) -> None:
        """Add a step: `(batch, n)`, mean over heads and action tokens; NaN for tokens that were pruned in it."""
        if self.steps and attention.shape != self.steps[0].shape:
            raise DartLabError(
                f"this step has shape {tuple(attention.shape)}, the ones before {tuple(self.steps[0].shape)}; "
                "reset() the history when an episode begins"
            )
        self.steps = [*self.steps, attention.detach().float()][-self.window :]

    def reset(self) -> None:
        """Forget everything: a new episode begins."""
        self.steps = []

    @property
    def warm(self) -> bool:
        """True once `window` steps are known."""
        return len(self.steps) >= self.window

    def predict(self) -> Tensor:
        """`(batch, n)` float32: Σ γ^i S^(t−i) / Σ γ^i, the newest step first, over the steps that saw the token.

        A token that no remembered step saw gets 0. Raises `DartLabError` for an empty history.
        """
        if not self.steps:
            raise DartLabError("the history is empty: push() the attention of an action first")
        past = torch.stack(self.steps[::-1])
        weight = self.decay ** torch.arange(len(past), device=past.device)[:, None, None] * ~past.isnan()
        return (weight * past.nan_to_num(nan=0.0)).sum(dim=0) / weight.sum(dim=0).clamp(min=1e-12)


@dataclass(frozen=True, kw_only=True)
class VLAPruner(Pruner):
    """The best `keep` tokens by semantic attention and the best `keep` by predicted action attention; of the two sets
    together, the ones farthest from each other.

    Args:
        keep: visual tokens to keep, or retention ratio.
        history: the episode's `ActionHistory`, filled by the caller. While it is not warm, every token is kept.
        layer: K. Default 3.
        semantic: whose attention in layer K−1 counts for the prompt: "mean" over all queries (default, the paper),
            "last" token (the released default), or "text": the question's tokens.

    The farthest-point choice is made on the input embeddings, as in DivPrune.

    >>> attention = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(1, 1, 4, 4)
    >>> signals = Signals.of(visual=torch.arange(4)[None], received=attention[:, 0, 0], embeds=torch.eye(4)[None])
    >>> history = ActionHistory(window=1)
    >>> history.push(torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
    >>> VLAPruner(keep=1, history=history)(signals).size, VLAPruner(keep=1, history=history)(signals).keep.shape
    (tensor([4]), torch.Size([1, 1]))

    Differs from the official code in: the newest step weighs most, as in the paper (there, the oldest); pruned tokens
    are left out of the history (there, they enter as 0 and stay low); the action's attention comes from the caller, who
    chooses its layers (there, layer 15; in the paper, the second half).
    """

    name: ClassVar[str] = "vla-pruner"
    paper: ClassVar[str] = "VLA-Pruner: Temporal-Aware Dual-Level Visual Token Pruning"

    layer: int = 3
    semantic: Semantic = "mean"
    history: ActionHistory = field(default_factory=ActionHistory, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "semantic", self.semantic, get_args(Semantic))

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The semantic signal, and embeddings."""
        return frozenset({"received" if self.semantic == "mean" else "attention", "embeds"})

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens to keep; all of them while the history is not warm."""
        return super().asked(signals) if self.history.warm else signals.counts

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Unite the two sets, and thin the union out."""
        if not self.history.warm:
            order = top_k(torch.zeros_like(signals.visual, dtype=torch.float32), asked, signals.valid)
            return Reduction(keep=ascending(order), size=signals.counts, asked=asked)
        action = self.history.predict().to(signals.visual.device)
        if action.shape != signals.visual.shape:
            raise DartLabError(
                f"vla-pruner: the history is of {tuple(action.shape)} tokens, the prompt has "
                f"{tuple(signals.visual.shape)}; reset() it when the camera or the batch changes"
            )
        n = signals.visual.shape[1]
        united = torch.zeros_like(signals.valid)
        for score in (self._semantic(signals), action):
            united |= rows_to_mask(top_k(score, asked, signals.valid), n)
        tokens = gather_tokens(signals.get("embeds"), signals.visual)
        order, reach = farthest_point(cosine_distance(tokens), asked, united)
        return Reduction(keep=ascending(order), size=signals.counts, asked=asked, order=order, notes={"reach": reach})

    def _semantic(self, signals: Signals) -> Tensor:
        if self.semantic == "mean":
            return signals.get("received").float().gather(1, signals.visual.clamp(min=0))
        if self.semantic == "last" or signals.text.shape[1] == 0:
            return signals.attention_to_visual(signals.last[:, None]).float().mean(dim=(1, 2))
        rows = signals.attention_to_visual(signals.text).float().mean(dim=1)
        return (rows * (signals.text >= 0)[:, :, None]).sum(dim=1)
