"""PruMerge: keep the patches whose class-token attention stands out, and merge their neighbours into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import check_whole
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.class_token import NEEDS, class_attention, class_token_note
from dart_lab.pruners.quota import upper_outliers
from dart_lab.pruners.reduction import PAD, Merge, Reduction, rows_to_mask
from dart_lab.pruners.selectors import ascending, cosine, padding_last, top_k
from dart_lab.pruners.signals import Signals, gather_tokens

Merging = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class PruMerge(Pruner):
    """Outliers of class-token attention (Tukey's rule), each merged with the patches whose keys are most like its own.

    Args:
        keep: tokens to keep in each crop, all kinds together, or retention ratio. None (default): as many as stand out,
            at least one.
        strided: PruMerge+: also keep evenly spaced patches. With `keep`, a quarter of the tokens is chosen by attention
            and the rest is spread over the other patches; without, every s-th patch is added, s = ⌊⌊n / k⌋ / 3⌋ for k
            outliers of n patches (so everything stays where more than a sixth stands out).
        neighbours: how many other patches, kept or not, merge into a kept one. Default 32.
        extra: one more token that gathers what is not kept, weighted by attention. Default True. It needs at least two
            tokens and something to gather, and is the last one.
        merging: "mean": weights of a slot are attention, scaled to sum 1; "sum": the kept token itself plus its
            neighbours times their attention, as in the released code. None: "mean" for budget="exact", "sum" for
            "official".
        budget: "official" also puts the tokens out by falling attention instead of as they lie in the picture.

    Notes: `class_token`, see `FasterVLM`. Raises `DartLabError` for parameters out of range.

    >>> row = torch.tensor([0.0, 0.6, 0.2, 0.2, 0.2]).expand(1, 1, 5, 5)
    >>> keys = torch.tensor([[[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.0, 1.0]]]])
    >>> signals = Signals.of(visual=torch.tensor([[1, 2, 3, 4]]), attention=row, keys=keys,
    ...                      class_token=torch.tensor([0]))
    >>> PruMerge(keep=1, neighbours=1)(signals).weights()
    tensor([[[0.7500, 0.0000, 0.2500, 0.0000]]])

    Differs from the official code in: attention is the mean over heads in the layer that gives the features (there, one
    head of 1,024 channels in the last layer), and see `merging` and `budget`; any batch size.
    """

    name: ClassVar[str] = "prumerge"
    needs: ClassVar[frozenset[str]] = NEEDS | {"keys"}
    positions: ClassVar[PositionPolicy] = "compact"
    paper: ClassVar[str] = "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models"

    strided: bool = False
    neighbours: int = 32
    extra: bool = True
    merging: Merging | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "merging", self.merging, (None, *get_args(Merging)))
        check_whole(f"{self.name}: neighbours", self.neighbours, least=0)

    def _needs_keep(self) -> bool:
        return False

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("VISION_OUT")

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Choose the centres, then merge their neighbours into them and the rest into one more token."""
        score, counts = class_attention(signals), signals.counts
        centres, gathers = self._centres(signals, score, asked)
        ranked = top_k(score, centres.sum(dim=1), centres)
        slots = ranked if self.budget == "official" else ascending(ranked)
        rest = signals.valid & ~centres
        gatherer = top_k(score, gathers.long(), rest)  # the best of the rest represents what gathers it
        mean = (self.merging or ("mean" if self.budget == "exact" else "sum")) == "mean"
        weights = torch.cat([
            self._neighbourhoods(signals, score, slots, mean),
            (score * (rest & gathers[:, None]))[:, None].expand(-1, gatherer.shape[1], -1),
        ], dim=1)
        if mean:
            own = torch.nn.functional.one_hot(torch.cat([slots, gatherer], dim=1).clamp(min=0), score.shape[1])
            total = weights.sum(dim=2, keepdim=True)
            weights = torch.where(total > 0, weights / total.clamp(min=torch.finfo(torch.float32).tiny), own)
        both = torch.cat([slots, gatherer], dim=1)
        sequence = padding_last(both)
        filled = (both != PAD).long().argsort(dim=1, descending=True, stable=True)[:, : sequence.shape[1]]
        weights = (weights * (both != PAD)[:, :, None]).gather(1, filled[:, :, None].expand(-1, -1, weights.shape[2]))
        return Reduction(
            keep=ascending(sequence), size=counts, asked=asked, slots=sequence, merge=Merge.from_dense(weights),
            score=score.masked_fill(~signals.valid, torch.nan), notes=class_token_note(signals),
        )

    def _centres(self, signals: Signals, score: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens are kept as centres `(batch, n)` bool, and whether one more gathers the rest `(batch,)` bool."""
        counts, n = signals.counts, score.shape[1]
        if self.keep is None:
            best = rows_to_mask(top_k(score, counts.clamp(max=1), signals.valid), n)
            centres = upper_outliers(score, signals.valid) | best
            if self.strided:
                step = (counts // centres.sum(dim=1).clamp(min=1) // 3).clamp(min=1)
                centres |= signals.valid & (torch.arange(n, device=score.device) % step[:, None] == 0)
            return centres, (centres.sum(dim=1) < counts) & self.extra
        gathers = (asked >= 2) & (asked < counts) & self.extra
        wanted = asked - gathers.long()
        by_attention = ((wanted + 3) // 4) if self.strided else wanted
        centres = rows_to_mask(top_k(score, by_attention, signals.valid), n)
        return centres | evenly(signals.valid & ~centres, wanted - by_attention), gathers

    def _neighbourhoods(self, signals: Signals, score: Tensor, slots: Tensor, mean: bool) -> Tensor:
        """`(batch, m, n)`: weight of every token in every kept one."""
        keys = gather_tokens(signals.get("keys").float().transpose(1, 2).flatten(2), signals.visual)
        n = score.shape[1]
        itself = slots.clamp(min=0)[:, :, None] == torch.arange(n, device=slots.device)
        likeness = cosine(gather_tokens(keys, slots), keys)
        others = (signals.valid[:, None, :] & ~itself).expand_as(likeness)
        wanted = others.sum(dim=2).clamp(max=self.neighbours)
        near = rows_to_mask(top_k(likeness.flatten(0, 1), wanted.flatten(), others.flatten(0, 1)), n)
        near = near.unflatten(0, likeness.shape[:2])
        own = score[:, None, :] if mean else torch.ones_like(score)[:, None, :]
        return torch.where(itself, own, torch.where(near, score[:, None, :], 0.0))


def evenly(tokens: Tensor, count: Tensor) -> Tensor:
    """The middle one of each of `count` `(batch,)` equal pieces of the tokens marked `(batch, n)`: `(batch, n)` bool.

    >>> evenly(torch.tensor([[True, True, True, False, True, True, True]]), torch.tensor([2]))
    tensor([[False,  True, False, False, False,  True, False]])
    """
    size, count = tokens.sum(dim=1, keepdim=True), count[:, None]
    place = tokens.long().cumsum(dim=1) - 1
    piece = (2 * place + 1) * count // (2 * size.clamp(min=1))
    middle = (2 * piece + 1) * size // (2 * count.clamp(min=1))
    return tokens & (place == middle) & (count > 0)
