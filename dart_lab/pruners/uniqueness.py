"""Uniqueness: how little a visual token resembles the prompt's last token (arXiv 2502.11501, the α-score)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from dart_lab.pruners.base import ScorePruner
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.selectors import cosine
from dart_lab.pruners.signals import Signals, gather_tokens

Representation = Literal["hidden", "normed"]


@dataclass(frozen=True, kw_only=True)
class Uniqueness(ScorePruner):
    """Keep the visual tokens whose cosine with the prompt's last token is lowest.

    Args:
        keep: visual tokens to keep, or retention ratio.
        representation: what is compared. "hidden": the output of layer K−1 (default); "normed": the same through the
            model's final norm, which makes this DART with the last token as its one pivot.

    >>> import torch
    >>> states = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.1]]])
    >>> Uniqueness(keep=1)(Signals.of(visual=torch.tensor([[0, 1, 2]]), hidden=states)).keep
    tensor([[1]])

    Differs from the official code in: none was released. Whether the paper compares normed states is unknown.
    """

    name: ClassVar[str] = "uniqueness"
    paper: ClassVar[str] = "Token Pruning in Multimodal LLMs: Are We Solving the Right Problem?, arXiv 2502.11501"

    representation: Representation = "hidden"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "representation", self.representation, get_args(Representation))

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The one signal compared."""
        return frozenset({self.representation})

    def score(self, signals: Signals) -> Tensor:
        """`(batch, n)`: the negated cosine."""
        states = signals.get(self.representation)
        return -cosine(gather_tokens(states, signals.last[:, None]), gather_tokens(states, signals.visual))[:, 0]
