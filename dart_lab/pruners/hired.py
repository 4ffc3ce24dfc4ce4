"""HiRED: share a budget over crops by where the content is, then rank within each (arXiv 2408.10945)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.pruners.base import PositionPolicy, ScorePruner, Stage
from dart_lab.pruners.budget import resolve_keep
from dart_lab.pruners.class_token import NEEDS, class_attention, class_token_note, early_class_attention
from dart_lab.pruners.quota import apportion
from dart_lab.pruners.reduction import Reduction, rows_to_mask
from dart_lab.pruners.selectors import top_k
from dart_lab.pruners.signals import Signals


@dataclass(frozen=True, kw_only=True)
class HiRED(ScorePruner):
    """Early class-token attention says where the content is, late attention which patches matter.

    The crop that shows the whole picture gets the share `alpha` of the picture's budget. The rest goes to the others in
    proportion to the attention that the class token of the whole view pays, in block 0, to the patches in the region
    that each of them shows. Within a crop the patches with the most attention in the feature layer stay.

    Args:
        keep: patches to keep in each crop on average, or retention ratio, of all crops of a picture together.
        alpha: share of the whole view. Default 0.5.
        early: the vision block that says where the content is. Default 0.
        budget: "exact" spends all: largest remainders, and what a full crop cannot take goes to the others. "official"
            does as the released code: each number rounded down, full crops clipped, and a crop's share is the number of
            the whole view's ⌊n·(1 − alpha)⌋ best patches in one of as many equal strips of consecutive patches as there
            are crops.

    A picture of a single crop is ranked alone, as `FasterVLM` does. Notes: `class_token`, see there.
    Raises `DartLabError` for alpha out of range, and for several crops in a tower without class token or whose places
    are unknown.

    >>> row = torch.tensor([0.1, 0.2, 0.5, 0.2]).expand(1, 2, 4, 4)
    >>> signals = Signals.of(visual=torch.tensor([[1, 2, 3]]), attention=row, class_token=torch.tensor([0]))
    >>> HiRED(keep=1)(signals).keep
    tensor([[1]])

    Differs from the official code in: regions are the rectangles that crops show (there, strips), shares are attention
    (there, counts), and the budget is spent (there, it is an upper limit); crops and their padding are packed as the
    model does it. `budget="official"` follows the released code in the first three.
    """

    name: ClassVar[str] = "hired"
    positions: ClassVar[PositionPolicy] = "compact"
    paper: ClassVar[str] = "HiRED: Attention-Guided Token Dropping for Efficient Inference of High-Resolution VLMs"

    alpha: float = 0.5
    early: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not 0 <= self.alpha <= 1:
            raise DartLabError(f"{self.name}: alpha={self.alpha!r}: give the share of the whole view, from 0 to 1")
        check_whole(f"{self.name}: early", self.early, least=0, hint="it numbers a vision block")

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("VISION_OUT")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Names of the signals that these parameters ask for."""
        return NEEDS | {f"attention@{self.early}"}

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: patches to keep in each crop."""
        official, counts = self.budget == "official", signals.counts
        image = torch.arange(len(counts), device=counts.device) if signals.image is None else signals.image
        asked = torch.zeros_like(counts)
        for one in image.unique():
            crops = (image == one).nonzero()[:, 0]
            sizes = counts[crops]
            total = self._total(sizes)
            if len(crops) == 1:
                asked[crops] = total
                continue
            base, tiles = split_views(signals, crops, self.name)
            share = min(int(total * self.alpha), int(counts[base]))
            if not official:
                share = max(share, total - int(counts[tiles].sum()))
            asked[base] = share
            asked[tiles] = self._tiles(signals, base, tiles, total - share)
        return asked

    def score(self, signals: Signals) -> Tensor:
        """`(batch, n)`: attention from the class token in the feature layer."""
        return class_attention(signals)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Keep the best patches of each crop and note what ranked them."""
        return replace(super().reduce(signals, asked), notes=class_token_note(signals))

    def _total(self, sizes: Tensor) -> int:
        if self.budget == "official" and isinstance(self.keep, float):
            return int(float(sizes.sum()) * self.keep)
        if isinstance(self.keep, float):
            return int(resolve_keep(self.keep, sizes.sum()[None]))
        return int(resolve_keep(self.keep or 1, sizes).sum())

    def _tiles(self, signals: Signals, base: Tensor, tiles: Tensor, total: int) -> Tensor:
        """Budgets of the crops that show a part: `(tiles,)` int64."""
        early = early_class_attention(signals, self.early, self.name)[base]
        limits = signals.counts[tiles]
        if self.budget == "exact":
            inside = [patches_in(signals, base, tile) for tile in tiles]
            return apportion(total, torch.stack([early[patches].sum() for patches in inside]), limits)
        n = int(signals.counts[base])
        marked = int(n * (1 - self.alpha))
        order = top_k(early[None], torch.tensor([marked], device=early.device), signals.valid[base][None])
        marks = rows_to_mask(order, n)[0]
        edges = [n * i // len(tiles) for i in range(len(tiles) + 1)]
        found = torch.stack([marks[a:b].sum() for a, b in pairwise(edges)])
        return torch.minimum(total * found // max(marked, 1), limits)


def split_views(signals: Signals, crops: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """The crop that shows the whole picture (the first, if several do), and the other crops."""
    if signals.region is None or signals.grid is None:
        raise DartLabError(f"{method}: the places of this image's {len(crops)} crops are unknown; use fastervlm")
    whole = (signals.region[crops] == torch.tensor([0.0, 0.0, 1.0, 1.0], device=crops.device)).all(dim=1)
    if not bool(whole.any()):
        raise DartLabError(f"{method}: none of the {len(crops)} crops shows the whole picture; use fastervlm")
    first = whole.long().argmax()
    return crops[first], torch.cat([crops[:first], crops[first + 1 :]])


def patches_in(signals: Signals, base: Tensor, tile: Tensor) -> Tensor:
    """`(n,)` bool: patches of the whole view whose centre lies in the region that the crop `tile` shows."""
    if signals.grid is None or signals.region is None:
        raise DartLabError("the places of patches and crops are unknown")
    place = signals.grid[base, :, 2:]
    size = place.amax(dim=0) + 1
    down, across = ((place + 0.5) / size).unbind(dim=1)
    left, top, right, bottom = signals.region[tile]
    return (place[:, 0] >= 0) & (left <= across) & (across < right) & (top <= down) & (down < bottom)
