"""SparseVLM: text tokens that look at the image rate the visual tokens (arXiv 2410.04417)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.assignment import MergeMode, merge_assigned, slot_of
from dart_lab.pruners.base import PositionPolicy, Pruner
from dart_lab.pruners.budget import check_choice, check_one_of, resolve_keep
from dart_lab.pruners.clustering import Distance, dpc_knn
from dart_lab.pruners.raters import attention_from_raters, text_raters
from dart_lab.pruners.reduction import PAD, Reduction, gather_tokens, rows_to_mask
from dart_lab.pruners.selectors import ascending, padding_last, top_k
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.staged import Staged

Version = Literal["v1", "v2"]
Count = int | float
Curve = tuple[tuple[float, float], ...]

SCHEDULES: Mapping[tuple[str, int], tuple[int, int, int]] = MappingProxyType({  # kept after the three stages
    ("v1", 192): (300, 200, 110), ("v1", 128): (303, 110, 36), ("v1", 96): (238, 48, 26), ("v1", 64): (66, 30, 17),
    ("v2", 192): (300, 200, 118), ("v2", 128): (238, 108, 60), ("v2", 96): (246, 54, 28), ("v2", 64): (66, 34, 20),
})
PUBLISHED_TOKENS = 576
PUBLISHED_LAYERS = (3, 7, 16)  # the outputs of layers 2, 6 and 15 are cut
POOL_SHARE = 0.3  # of the deleted tokens, the best ones may come back
POOL_PER_CLUSTER = 10
OFFICIAL_HEADS = 14  # what the released second version keeps of any model's heads


@dataclass(frozen=True, kw_only=True)
class SparseVLM(Staged):
    """Three cuts inside the language model; what is deleted comes back in part as cluster means (version 1).

    Args:
        keep: the budget by which papers name a schedule, about the average over 32 layers: 64, 96, 128 and 192 are the
            published schedules (`SCHEDULES`); any other number or ratio interpolates them, as shares of 576 tokens.
            Leave out if `schedule` is given.
        schedule: tokens to keep at each of `layers`, recycled ones not counted: whole numbers, or shares of the tokens
            before any stage. A stage that has fewer keeps all of them.
        layers: first decoder layer after each cut. Default (3, 7, 16).
        version: "v1" (default) recycles and renumbers positions (`positions` "compact"); "v2" takes the half of the
            heads that look at the image most, recycles nothing and leaves positions alone.
        merge, distance: how recycled tokens are made. "mean" and "euclidean" (default) as in the released code, "sum"
            and "cosine" as in the paper.
        budget: "official" keeps at most all tokens but one, and 14 heads in version 2, as the released code does.

    >>> [(part.layer, part.keep) for part in SparseVLM(keep=64).parts()]
    [(3, 66), (7, 30), (16, 17)]

    Differs from the official code in: density ties go to the lower index, where the code adds unseeded noise; a
    question whose tokens all look alike has all of them as raters, where the code's set is empty; half of the heads,
    not 14; budgets other than the published ones; the position-bias correction of version 2 is left out, whose divisor
    turns negative at distances from 1707 on.
    """

    name: ClassVar[str] = "sparsevlm"
    paper: ClassVar[str] = "SparseVLM: Visual Token Sparsification for Efficient VLM Inference, arXiv 2410.04417"

    schedule: tuple[Count, ...] | None = None
    layers: tuple[int, ...] = PUBLISHED_LAYERS
    version: Version = "v1"
    merge: MergeMode = "mean"
    distance: Distance = "euclidean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(self.name, keep=self.keep, schedule=self.schedule)
        check_choice(self.name, "version", self.version, get_args(Version))
        stages = 3 if self.schedule is None else len(self.schedule)
        if len(self.layers) != stages or list(self.layers) != sorted(set(self.layers)):
            raise DartLabError(f"sparsevlm: layers={self.layers}: give {stages} layers, rising, one for each stage")

    def _needs_keep(self) -> bool:
        return False

    @property
    def positions(self) -> PositionPolicy:  # type: ignore[override]
        """Version 1 renumbers, version 2 does not."""
        return "compact" if self.version == "v1" else "original"

    def counts(self) -> tuple[Count, ...] | None:
        """What each stage keeps, recycled tokens not counted; None if that depends on the number of tokens."""
        published = self.keep if isinstance(self.keep, int) else 0
        return self.schedule or SCHEDULES.get((self.version, published))

    def parts(self) -> tuple[Pruner, ...]:
        """One cut a layer."""
        first = self.version == "v1"
        given = self.counts() or (self.keep or 1.0,) * len(self.layers)
        curves = (None,) * len(self.layers) if self.counts() else published_curves(self.version)
        return tuple(
            SparseVLMStage(
                keep=keep, curve=curve, layer=layer, budget=self.budget, recycle=first, merge=self.merge,
                distance=self.distance, heads=1.0 if first else self._heads(), renumber=first,
            )
            for keep, curve, layer in zip(given, curves, self.layers, strict=True)
        )

    def _heads(self) -> int | float:
        return OFFICIAL_HEADS if self.budget == "official" else 0.5


@dataclass(frozen=True, kw_only=True)
class SparseVLMStage(Pruner):
    """One cut of `SparseVLM` at `layer`.

    Args:
        keep: tokens to keep, or share of those before any stage.
        curve: points (budget, kept), both as shares of the tokens before any stage, rising; `keep` then names the
            budget, and what is kept is read off the curve.
        recycle: bring the best deleted tokens back as cluster means.
        merge, distance: see `SparseVLM`.
        heads: how many heads count, or which share of them; those with most attention from raters to the image.
        rank_scale, rank_bias: keep ⌊rank · scale + bias⌋ tokens, rank being that of the raters' attention matrix,
            in place of `keep` (the first release); nothing is deleted if the rank is full.
        renumber: positions are "compact".

    >>> rows = torch.tensor([0.1, 0.4, 0.3, 0.2]).expand(1, 1, 4, 4)
    >>> text = torch.eye(4)[None]
    >>> signals = Signals.of(visual=torch.tensor([[0, 1, 2]]), attention=rows, embeds=text)
    >>> SparseVLMStage(keep=2, recycle=False)(signals).keep
    tensor([[1, 2]])
    """

    name: ClassVar[str] = "sparsevlm-stage"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "embeds", "hidden"})  # image_embeds, where it is offered

    curve: Curve | None = None
    recycle: bool = True
    merge: MergeMode = "mean"
    distance: Distance = "euclidean"
    heads: int | float = 1.0
    rank_scale: float | None = None
    rank_bias: float = 0.0
    renumber: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(self.name, keep=self.keep, rank_scale=self.rank_scale)
        check_choice(self.name, "merge", self.merge, get_args(MergeMode))
        check_choice(self.name, "distance", self.distance, get_args(Distance))

    def _needs_keep(self) -> bool:
        return self.rank_scale is None

    @property
    def positions(self) -> PositionPolicy:  # type: ignore[override]
        """Whether tokens are renumbered."""
        return "compact" if self.renumber else "original"

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: survivors and recycled tokens together; -1 where the rank decides."""
        if self.keep is None:
            return torch.full_like(signals.counts, PAD)
        survive = self.survivors(signals.counts, signals.before)
        return survive + self.recycled(signals.counts - survive)

    def survivors(self, counts: Tensor, before: Tensor) -> Tensor:
        """Tokens that stay as they are, of `counts` here and `before` before any stage: `(batch,)` int64."""
        keep = 1.0 if self.keep is None else self.keep
        wanted = resolve_keep(keep, before) if isinstance(keep, float) else torch.full_like(counts, keep)
        if self.curve is not None:
            budget, kept = np.array(self.curve).T
            share = np.interp((wanted / before).cpu().numpy(), budget, kept)
            wanted = (torch.from_numpy(share).to(before.device) * before + 0.5).floor().long().clamp(min=1)
        return wanted.minimum(counts - 1 if self.budget == "official" else counts)

    def recycled(self, deleted: Tensor) -> Tensor:
        """Clusters made of `deleted` `(batch,)` tokens: one for every ten of the pool, and one more."""
        if not self.recycle:
            return torch.zeros_like(deleted)
        return (pool_size(deleted) // POOL_PER_CLUSTER + 1).masked_fill(deleted == 0, 0)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Rate, cut, and recycle."""
        raters = text_raters(signals)
        rows = attention_from_raters(signals, raters, heads=self.heads)  # (batch, raters, n)
        counted = (raters != PAD)[:, :, None]
        score = (rows * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        survive = self.survivors(signals.counts, signals.before)
        if self.rank_scale is not None:
            survive = self._by_rank(rows * counted, signals.counts)
        order = top_k(score, survive, signals.valid)
        notes = {"raters": raters, "survivors": survive}
        score = score.masked_fill(~signals.valid, float("nan"))
        kept = rows_to_mask(order, signals.visual.shape[1])
        deleted = signals.valid & ~kept
        if not self.recycle or not bool(deleted.any()):
            return Reduction(
                keep=ascending(order), size=signals.counts, asked=asked, order=order, score=score, notes=notes
            )
        return self._recycle(signals, ascending(order), deleted, score, notes, asked)

    def _by_rank(self, rows: Tensor, counts: Tensor) -> Tensor:
        rank = torch.linalg.matrix_rank(rows)
        wanted = (rank * float(self.rank_scale or 0) + self.rank_bias).floor().long().clamp(min=0).minimum(counts - 1)
        return torch.where(rank == counts, counts, wanted)

    def _recycle(
        self, signals: Signals, kept: Tensor, deleted: Tensor, score: Tensor, notes: Mapping[str, Tensor],
        asked: Tensor,
    ) -> Reduction:
        """Cluster the best deleted tokens; each cluster becomes a slot after the survivors, in its centre's name."""
        number = deleted.sum(dim=1)
        pool = top_k(score.nan_to_num(nan=0.0), pool_size(number).minimum(number), deleted)
        states = gather_tokens(signals.get("hidden"), signals.visual.gather(1, pool.clamp(min=0)))
        found = dpc_knn(states, self.recycled(number), pool != PAD, assign=self.distance)
        centres = pool.gather(1, found.centre.clamp(min=0)).masked_fill(found.centre == PAD, PAD)
        sequence, first = append_rows(kept, centres)
        n = signals.visual.shape[1]
        slot = slot_of(sequence, n)
        member = torch.where(found.member == PAD, PAD, found.member + first[:, None])
        index = torch.where(pool == PAD, n, pool)
        slot = torch.cat([slot, slot[:, :1]], dim=1).scatter(1, index, member)[:, :n]
        merge, sizes = merge_assigned(slot, sequence.shape[1], mode=self.merge)
        return Reduction(
            keep=ascending(sequence), size=signals.counts, asked=asked, slots=sequence, merge=merge, sizes=sizes,
            score=score, notes={**notes, "pool": pool, "centres": centres, "member": found.member},
        )


def published_curves(version: str) -> tuple[Curve, ...]:
    """For each stage, the share kept at each published budget, as shares of LLaVA-1.5's 576 tokens."""
    budgets = sorted(budget for named, budget in SCHEDULES if named == version)
    known = [(b, SCHEDULES[version, b]) for b in budgets]
    return tuple(
        ((0.0, 0.0), *((b / PUBLISHED_TOKENS, kept[i] / PUBLISHED_TOKENS) for b, kept in known), (1.0, 1.0))
        for i in range(len(PUBLISHED_LAYERS))
    )


def pool_size(deleted: Tensor) -> Tensor:
    """How many of the `deleted` `(batch,)` tokens may come back: 30 %, rounded down, and one more."""
    return ((deleted.double() * POOL_SHARE).floor().long() + 1).masked_fill(deleted == 0, 0)


def append_rows(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Put the indices of each row of `second` right behind those of `first`; also `(batch,)`, where they begin.

    >>> append_rows(torch.tensor([[4, -1], [5, 6]]), torch.tensor([[7], [8]]))
    (tensor([[ 4,  7, -1],
            [ 5,  6,  8]]), tensor([1, 2]))
    """
    return padding_last(torch.cat([first, second], dim=1)), (first != PAD).sum(dim=1)
