"""FastV: keep the visual tokens that the prompt's last token attends to most (arXiv 2403.06764)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import ScorePruner
from dart_lab.pruners.budget import check_choice, check_one_of, check_reduction_ratio, retained
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.signals import Signals

NamedQuery = Literal["last", "mean", "last_visual"]
Rounding = Literal["round", "int"]


@dataclass(frozen=True, kw_only=True)
class FastV(ScorePruner):
    """Attention received in layer K−1, mean over heads, from a set of query tokens.

    Args:
        keep: visual tokens to keep, or retention ratio. Leave out if `reduction_ratio` is given.
        query: whose attention counts. "last": the prompt's last token (default, what the released code does); "mean":
            all text tokens after the image, averaged (close to the paper's wording; the last token alone if there is no
            text); "last_visual": the last visual token; or a tuple of places in the text after the image, counted as in
            Python: (0, -1) are its first and last token.
        rerank: repeat the ranking at every decode step instead of once at prefill. Default False. The ranking itself is
            the same; whoever inserts the method acts on it.
        budget: "exact" rounds half up; "official" turns a share of L visual tokens into a number as released code does.
        rounding: official budget only. "round": half to even, the code for Hugging Face models (default); "int":
            towards zero, the lmms-eval code and EPIC.
        reduction_ratio: the removed share, as the released code is given it (official budget only).

    The scores are softmax probabilities over the whole sequence, not renormalised over the image.
    Raises `DartLabError` for contradictory parameters and for places outside the text.

    >>> row = torch.tensor([0.1, 0.5, 0.4, 0.0]).expand(1, 2, 4, 4)
    >>> FastV(keep=1)(Signals.of(visual=torch.tensor([[0, 1, 2]]), attention=row)).keep
    tensor([[1]])

    Differs from the official code in: any batch size (there, the first sample's ranking serves all); the image is where
    it is, not at a fixed position 35 or 36; no layer is run twice and no attention backend is changed.
    """

    name: ClassVar[str] = "fastv"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    paper: ClassVar[str] = "An Image is Worth 1/2 Tokens After Layer 2, arXiv 2403.06764"

    query: NamedQuery | tuple[int, ...] = "last"
    rerank: bool = False
    rounding: Rounding = "round"
    reduction_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(self.name, keep=self.keep, reduction_ratio=self.reduction_ratio)
        check_reduction_ratio(self.name, self.reduction_ratio, self.budget)
        check_choice(self.name, "rounding", self.rounding, get_args(Rounding))
        if not isinstance(self.query, tuple):
            check_choice(self.name, "query", self.query, get_args(NamedQuery))
        elif not self.query or any(isinstance(q, bool) or not isinstance(q, int) for q in self.query):
            raise DartLabError(f"{self.name}: query={self.query}: give at least one place in the text, such as (-1,)")

    def _needs_keep(self) -> bool:
        return self.reduction_ratio is None

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens to keep in each sample."""
        if self.budget == "exact" or isinstance(self.keep, int):
            return super().asked(signals)
        wanted = signals.counts.double() * retained(self.keep, self.reduction_ratio)
        return (wanted.round() if self.rounding == "round" else wanted.trunc()).long()

    def score(self, signals: Signals) -> Tensor:
        """`(batch, n)`: attention received, mean over heads, then over the query set."""
        queries = self.queries(signals)
        rows = signals.attention_to_visual(queries).float().mean(dim=1)  # (batch, q, n)
        counted = (queries != PAD)[:, :, None]
        return (rows * counted).sum(dim=1) / counted.sum(dim=1)

    def queries(self, signals: Signals) -> Tensor:
        """`(batch, q)` int64: positions of the query tokens in the sequence, padded with -1."""
        last = signals.last[:, None]
        if self.query == "last":
            return last
        if self.query == "last_visual":
            return signals.visual.max(dim=1, keepdim=True).values
        text, length = signals.text, (signals.text != PAD).sum(dim=1)
        if self.query == "mean":
            return _or_last(text, last)
        places = torch.tensor(self.query, device=text.device)[None, :]
        index = torch.where(places < 0, places + length[:, None], places)
        if bool(((index < 0) | (index >= length[:, None])).any()):
            raise DartLabError(
                f"{self.name}: query={self.query} lies outside the text after the image, which has "
                f"{int(length.min())} tokens in the shortest sample"
            )
        return torch.gather(text, 1, index)


def _or_last(text: Tensor, last: Tensor) -> Tensor:
    """Text positions, or the last token for a row that has none: `(batch, t)`, `(batch, 1)` → `(batch, max(t, 1))`."""
    padded = text if text.shape[1] else torch.full_like(last, PAD)
    empty = (padded == PAD).all(dim=1, keepdim=True)
    return torch.cat([torch.where(empty, last, padded[:, :1]), padded[:, 1:]], dim=1)
