"""VisPruner: half of the budget for patches the class token attends to, half for patches unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.class_token import NEEDS, class_attention, class_token_note
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.selectors import ascending, cosine, padding_last, top_k
from dart_lab.pruners.signals import Signals, gather_tokens


@dataclass(frozen=True, kw_only=True)
class VisPruner(Pruner):
    """Important patches by class-token attention, then diverse ones among the rest.

    The rest stands in a line by falling attention. In every round the line is split into even and odd places; the
    `per_round` even patches most like some odd patch go; the line becomes the even survivors, most alike first, and
    then the odd ones; until the quota is left.

    Args:
        keep: patches to keep in each crop, or retention ratio.
        important: share of the budget for important patches, rounded down. Default 0.5 (the paper, except 0.75 at 64
            of 576).
        per_round: how many patches go in a round. Default 8, as in the released code.

    Notes: `important` `(batch,)` int64, how many patches attention chose; `class_token`, see `FasterVLM`.
    Raises `DartLabError` for parameters out of range.

    >>> row = torch.tensor([0.0, 0.4, 0.3, 0.2, 0.1]).expand(1, 1, 5, 5)
    >>> states = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 0.1], [1.0, 0.0], [0.0, 1.0]]])
    >>> signals = Signals.of(visual=torch.tensor([[1, 2, 3, 4]]), attention=row, hidden=states,
    ...                      class_token=torch.tensor([0]))
    >>> VisPruner(keep=3)(signals).keep
    tensor([[0, 2, 3]])

    Differs from the official code in: an odd number of patches, and fewer than two rounds' worth of them, are no error
    (a round takes no more even patches than there are).
    """

    name: ClassVar[str] = "vispruner"
    needs: ClassVar[frozenset[str]] = NEEDS | {"hidden"}
    positions: ClassVar[PositionPolicy] = "compact"
    paper: ClassVar[str] = "Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs"

    important: float = 0.5
    per_round: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.important, bool) or not 0 <= self.important <= 1:
            raise DartLabError(f"{self.name}: important={self.important!r}: give a share from 0 to 1")
        check_whole(f"{self.name}: per_round", self.per_round, least=1)

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("VISION_OUT")

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Take the important patches, thin out the rest."""
        score = class_attention(signals)
        ranked = top_k(score, signals.counts, signals.valid)
        count = (asked.double() * self.important).long()
        place = torch.arange(ranked.shape[1], device=ranked.device)
        important = ranked.masked_fill(place >= count[:, None], PAD)
        rest = padding_last(ranked.masked_fill(place < count[:, None], PAD))
        tokens = gather_tokens(signals.get("hidden"), signals.visual)
        diverse = thin_out(rest, cosine(tokens, tokens), asked - count, self.per_round)
        order = padding_last(torch.cat([important, diverse], dim=1))
        return Reduction(
            keep=ascending(order), size=signals.counts, asked=asked, order=order,
            score=score.masked_fill(~signals.valid, torch.nan),
            notes={"important": count, **class_token_note(signals)},
        )


def thin_out(line: Tensor, similarity: Tensor, quota: Tensor, per_round: int) -> Tensor:
    """Shorten each line to its quota, round by round; see `VisPruner`.

    Args:
        line: `(batch, m)` tokens in order, -1 padded at the end.
        similarity: `(batch, n, n)`.
        quota: `(batch,)` int64, how many are to be left.
        per_round: how many go in a round.

    Returns:
        `(batch, largest quota)` int64, -1 padded.

    >>> alike = torch.tensor([[[1.0, 0.9, 0.0], [0.9, 1.0, 0.1], [0.0, 0.1, 1.0]]])
    >>> thin_out(torch.tensor([[0, 1, 2]]), alike, torch.tensor([2]), 8)
    tensor([[2, 1]])
    """
    while bool((excess := (line != PAD).sum(dim=1) - quota).any()):
        even, odd = line[:, 0::2], line[:, 1::2]
        likeness = nearest_likeness(similarity, even, odd)
        order = top_k(likeness, (even != PAD).sum(dim=1), even != PAD)
        survivors = even.gather(1, order.clamp(min=0)).masked_fill(order == PAD, PAD)
        place = torch.arange(survivors.shape[1], device=line.device)
        shorter = torch.cat([survivors.masked_fill(place < excess.clamp(max=per_round)[:, None], PAD), odd], dim=1)
        shorter = torch.nn.functional.pad(shorter, (0, line.shape[1] - shorter.shape[1]), value=PAD)
        line = padding_last(torch.where((excess > 0)[:, None], shorter, line))
    return line


def nearest_likeness(similarity: Tensor, tokens: Tensor, others: Tensor) -> Tensor:
    """`(batch, p)`: each token's largest similarity to any of the others, −∞ where there is none; -1 pads both."""
    rows = similarity.gather(1, tokens.clamp(min=0)[:, :, None].expand(-1, -1, similarity.shape[2]))
    pairs = rows.gather(2, others.clamp(min=0)[:, None, :].expand(-1, tokens.shape[1], -1))
    pairs = pairs.masked_fill((others == PAD)[:, None, :], -torch.inf)
    return torch.nn.functional.pad(pairs, (0, 1), value=-torch.inf).amax(dim=2)
