"""MustDrop: merge in the vision tower, filter by text attention, clear the cache (arXiv 2411.10803)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.pruners.assignment import in_order, merge_assigned, slot_of
from dart_lab.pruners.base import Pruner, Stage
from dart_lab.pruners.budget import resolve_keep
from dart_lab.pruners.grid_windows import window_similarity, windows
from dart_lab.pruners.reduction import PAD, Reduction, gather_tokens, mask_to_rows, rows_to_mask
from dart_lab.pruners.selectors import ascending, top_k
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.staged import Staged

PUBLISHED_LAYERS = (3, 7, 11, 15)  # the outputs of layers 2, 6, 10 and 14 are cut


@dataclass(frozen=True, kw_only=True)
class MustDrop(Staged):
    """Three stages: alike 3×3 windows become one token; what text hardly looks at goes; the caches follow.

    Args:
        global_share, individual: g and h. A visual token goes if its share of what all visual tokens receive from the
            text is below g and no text token gives it h or more. Defaults 0.001 and 0.001, for about 192 of 576.
        keep: exact counts in place of thresholds: the last of `layers` keeps this number or share, the ones before it
            fall geometrically; tokens that the thresholds protect rank first. The method itself knows no budget; this
            calibrates g for every prompt.
        layers: decoder layers before which tokens are dropped. Default (3, 7, 11, 15).
        similarity: windows at least this alike are merged in the vision tower; None leaves the tower alone.
        window: side of a window, in patches.
        key_share: share of the patches with most attention from the class token that no later stage may drop.
        key_block: vision block that this attention is taken from; None (default): the one that made the features.
        clear_cache: at the end, layers from the first cut on keep only final survivors in their caches.
        budget: "official" puts merged windows first, by similarity, in place of raster order.

    >>> [(p.stage.kind, p.stage.layer) for p in MustDrop(layers=(3, 7)).parts()]  # doctest: +NORMALIZE_WHITESPACE
    [('VIT_BLOCK', 0), ('VISION_OUT', 0), ('LLM_LAYER', 3), ('LLM_LAYER', 7), ('POST_PREFILL_CACHE', 2)]

    Differs from the official code in: every image merges as many windows as its own similarities say, where the least
    of the batch served all; merging happens before the first block's MLP, not behind it; raster order is kept; the key
    set comes from the block whose features are used (`key_block=23` for the one behind); positions go on behind the
    prompt's last one after the caches are cleared, where the code falls behind some kept keys.
    """

    name: ClassVar[str] = "mustdrop"
    positions: ClassVar[Literal["compact"]] = "compact"
    paper: ClassVar[str] = "Multi-Stage Vision Token Dropping, arXiv 2411.10803"

    global_share: float = 0.001
    individual: float = 0.001
    layers: tuple[int, ...] = PUBLISHED_LAYERS
    similarity: float | None = 0.8
    window: int = 3
    key_share: float = 0.08
    key_block: int | None = None
    clear_cache: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise DartLabError(f"mustdrop: layers={self.layers}: give rising decoder layers, at least one")
        check_whole("mustdrop: window", self.window, least=2, hint="it is a side in patches")

    def _needs_keep(self) -> bool:
        return False

    def parts(self) -> tuple[Pruner, ...]:
        """Windows in the tower, key set behind it, a filter a layer, the cache."""
        found: list[Pruner] = []
        if self.similarity is not None:
            found.append(MustDropWindows(similarity=self.similarity, window=self.window, budget=self.budget))
        found.append(MustDropKeys(key_share=self.key_share, key_block=self.key_block))
        for i, layer in enumerate(self.layers):
            found.append(MustDropFilter(
                keep=self.keep, fraction=(i + 1) / len(self.layers), global_share=self.global_share,
                individual=self.individual, layer=layer,
            ))
        return (*found, MustDropCache(first=self.layers[0] - 1)) if self.clear_cache else tuple(found)


@dataclass(frozen=True, kw_only=True)
class MustDropWindows(Pruner):
    """First stage of `MustDrop`: windows of patches that are alike become their mean.

    >>> grid = torch.tensor([[[0, 0, r, c] for r in range(2) for c in range(2)]])
    >>> signals = Signals.of(visual=torch.arange(4)[None], grid=grid, hidden=torch.ones(1, 4, 8))
    >>> MustDropWindows(window=2)(signals).keep
    tensor([[0]])
    """

    name: ClassVar[str] = "mustdrop-windows"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    positions: ClassVar[Literal["compact"]] = "compact"

    similarity: float = 0.8
    window: int = 3

    def _needs_keep(self) -> bool:
        return False

    @property
    def stage(self) -> Stage:
        """The first vision block."""
        return Stage("VIT_BLOCK", 0)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Merge every whole window whose mean pairwise cosine reaches the threshold."""
        if signals.grid is None:
            raise DartLabError("mustdrop: windows need the patches' places; without a grid give similarity=None")
        n, states = signals.visual.shape[1], gather_tokens(signals.get("hidden"), signals.visual)
        home, first = windows(signals.grid, signals.valid, self.window)  # window of each patch, first patch of each
        if not first.shape[1]:  # no grid holds a whole window
            return Reduction.from_mask(signals.valid, signals.counts)
        alike = window_similarity(states, home, first)
        merges = (first != PAD) & (alike >= self.similarity)
        inside = (home != PAD) & merges.gather(1, home.clamp(min=0))
        heads = rows_to_mask(torch.where(merges, first, PAD), n)
        sequence = mask_to_rows(signals.valid & (~inside | heads))
        own = slot_of(sequence, n)
        head = first.gather(1, home.clamp(min=0))
        slot = torch.where(inside, own.gather(1, head.clamp(min=0)), own)
        merge, sizes = merge_assigned(slot, sequence.shape[1])
        reduction = Reduction(
            keep=sequence, size=signals.counts, asked=asked, merge=merge, sizes=sizes,
            notes={"similarity": alike, "merged": merges},
        )
        if self.budget == "exact":
            return reduction
        by_similarity = top_k(alike, merges.sum(dim=1), merges)
        rank = slot_of(by_similarity, first.shape[1]).gather(1, home.clamp(min=0))
        place = torch.arange(n, device=home.device).expand_as(home)
        return in_order(reduction, torch.where(inside & (rank != PAD), rank - n, place))


@dataclass(frozen=True, kw_only=True)
class MustDropKeys(Pruner):
    """Behind the tower: note which patches the class token attends to most; nothing is dropped.

    The note `key_tokens` `(batch, n)` bool is for the later stages.

    >>> rows = torch.tensor([0.1, 0.2, 0.6, 0.1]).expand(1, 1, 4, 4)
    >>> signals = Signals.of(visual=torch.tensor([[1, 2, 3]]), attention=rows, class_token=torch.tensor([0]))
    >>> MustDropKeys(key_share=0.3)(signals).notes["key_tokens"]
    tensor([[False,  True, False]])
    """

    name: ClassVar[str] = "mustdrop-keys"

    key_share: float = 0.08
    key_block: int | None = None

    def _needs_keep(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Attention of the chosen block; received attention where there is no class token."""
        return frozenset({self._map(), "received"})

    @property
    def stage(self) -> Stage:
        """Behind the tower."""
        return Stage("VISION_OUT")

    def _map(self) -> str:
        return "attention" if self.key_block is None else f"attention@{self.key_block}"

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Keep everything; mark ⌈share · n⌉ key tokens."""
        if signals.cls is None:
            score = signals.get("received").gather(1, signals.visual.clamp(min=0))
        else:
            score = signals.attention_to_visual(signals.cls[:, None], of=self._map()).mean(dim=1)[:, 0]
        number = (signals.counts.double() * self.key_share).ceil().long()
        chosen = top_k(score, number, signals.valid)
        keys = slot_of(chosen, signals.visual.shape[1]) != PAD
        return Reduction.from_mask(signals.valid, signals.counts, asked=signals.counts, notes={"key_tokens": keys})


@dataclass(frozen=True, kw_only=True)
class MustDropFilter(Pruner):
    """Second stage of `MustDrop` at `layer`: drop what the text looks at neither together nor one by one.

    Args:
        global_share, individual, keep: see `MustDrop`.
        fraction: with `keep`, how far along the way from all tokens to `keep` this stage is, on a logarithmic scale.

    Tokens in the signal `key_tokens` `(batch, n)`, where an earlier stage offers it, stay.

    >>> rows = torch.tensor([0.5, 0.2, 0.0, 0.3]).expand(1, 1, 4, 4)
    >>> MustDropFilter()(Signals.of(visual=torch.tensor([[0, 1, 2]]), attention=rows)).keep
    tensor([[0, 1]])
    """

    name: ClassVar[str] = "mustdrop-filter"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    positions: ClassVar[Literal["compact"]] = "compact"

    global_share: float = 0.001
    individual: float = 0.001
    fraction: float = 1.0

    def _needs_keep(self) -> bool:
        return False

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64; -1 where the thresholds decide."""
        if self.keep is None:
            return super().asked(signals)
        before, final = signals.before.double(), resolve_keep(self.keep, signals.before)
        return (before * (final / before) ** self.fraction + 0.5).floor().long().minimum(signals.counts)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Apply the thresholds, or rank by them."""
        text = signals.text if signals.text.shape[1] else signals.last[:, None]
        text = torch.cat([torch.where(text[:, :1] == PAD, signals.last[:, None], text[:, :1]), text[:, 1:]], dim=1)
        rows = signals.attention_to_visual(text).mean(dim=1).masked_fill((text == PAD)[:, :, None], 0.0)
        together, single = rows.sum(dim=1), rows.amax(dim=1)
        key = signals.get("key_tokens").bool() if "key_tokens" in signals.providers else torch.zeros_like(signals.valid)
        total = together.sum(dim=1, keepdim=True)
        score = together / total.clamp(min=torch.finfo(torch.float32).tiny)
        if self.keep is not None:
            tier = key.long() * 2 + (single >= self.individual).long()  # a share never exceeds 1
            order = top_k(score + 2 * tier.float(), asked, signals.valid)
            return Reduction(
                keep=ascending(order), size=signals.counts, asked=asked, order=order,
                score=score.masked_fill(~signals.valid, math.nan),
            )
        drop = (together < self.global_share * total) & (single < self.individual) & ~key
        return Reduction.from_mask(
            signals.valid & ~drop, signals.counts, asked=asked, score=score.masked_fill(~signals.valid, math.nan)
        )


@dataclass(frozen=True, kw_only=True)
class MustDropCache(Pruner):
    """Third stage of `MustDrop`: caches of the layers from `first` on keep what the last layer still had.

    >>> alive = torch.tensor([[True, False, True]])
    >>> signals = Signals.of(visual=torch.tensor([[0, 1, 2]]), attended=alive | True, survives=alive)
    >>> MustDropCache(first=2)(signals).keep
    tensor([[0, 2]])
    """

    name: ClassVar[str] = "mustdrop-cache"
    needs: ClassVar[frozenset[str]] = frozenset({"survives"})

    first: int

    def _needs_keep(self) -> bool:
        return False

    @property
    def stage(self) -> Stage:
        """Behind the prompt, in the layers from `first` on."""
        return Stage("POST_PREFILL_CACHE", self.first)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Keep the survivors."""
        alive = signals.get("survives").bool().gather(1, signals.visual.clamp(min=0))
        return Reduction.from_mask(alive & signals.valid, signals.counts)
