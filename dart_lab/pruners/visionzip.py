"""VisionZip: dominant patches stay, the rest is merged into a few contextual tokens (arXiv 2412.04467)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.assignment import merge_assigned, slot_of
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.class_token import NEEDS, class_attention, class_token_mask, class_token_note
from dart_lab.pruners.reduction import PAD, Merge, Reduction, mask_to_rows, rows_to_mask
from dart_lab.pruners.selectors import ascending, cosine, padding_last, top_k
from dart_lab.pruners.signals import Signals, gather_tokens

Merging = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class VisionZip(Pruner):
    """Dominant patches stay as they are; every other patch is merged into one of a few evenly spaced targets.

    The class token, where there is one, counts as a visual token and is the first of the dominant ones. Of the n
    patches that are left, numbers 0, step, 2·step, … with step = ⌊n / contextual⌋ are the targets; each of the others
    goes to the target with the most similar key (cosine, keys averaged over heads). Output: class token and dominant
    patches as they lie in the picture, then the contextual tokens.

    Args:
        keep: tokens to keep in each crop, dominant and contextual together, or retention ratio.
        contextual: how many of them are contextual: a number, or a share of `keep`. Default 5/32: the published
            54 + 10, 108 + 20 and 162 + 30.
        merging: "mean": a contextual token is the mean of the target and what was assigned to it; "sum": the target
            plus the mean of what was assigned to it, about twice as long, as in the released code. None: "mean" for
            budget="exact", "sum" for "official".

    Notes: `class_token`, see `FasterVLM`. Raises `DartLabError` for parameters out of range.

    >>> row = torch.tensor([0.0, 0.4, 0.3, 0.2, 0.1]).expand(1, 1, 5, 5)
    >>> keys = torch.tensor([[[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]]])
    >>> signals = Signals.of(visual=torch.arange(5)[None], attention=row, keys=keys, class_token=torch.tensor([0]))
    >>> VisionZip(keep=3, contextual=1)(signals).members().int()
    tensor([[[1, 0, 0, 0, 0],
             [0, 1, 0, 0, 0],
             [0, 0, 1, 1, 1]]], dtype=torch.int32)

    Differs from the official code in: `merging` (see there); the tower is not altered for the whole process; without a
    class token, attention received takes its place; high-resolution pictures are packed as the model does it (there,
    class and contextual tokens of the crops follow the picture, and newlines are left out).
    """

    name: ClassVar[str] = "visionzip"
    needs: ClassVar[frozenset[str]] = NEEDS | {"keys"}
    positions: ClassVar[PositionPolicy] = "compact"
    keeps_cls: ClassVar[bool] = True
    paper: ClassVar[str] = "VisionZip: Longer is Better but Not Necessary in Vision Language Models, arXiv 2412.04467"

    contextual: int | float = 5 / 32
    merging: Merging | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "merging", self.merging, (None, *get_args(Merging)))
        share = isinstance(self.contextual, float) and 0 <= self.contextual < 1
        whole = isinstance(self.contextual, int) and not isinstance(self.contextual, bool) and self.contextual >= 0
        if not share and not whole:
            raise DartLabError(
                f"{self.name}: contextual={self.contextual!r}: give a number of tokens, or a share of keep below 1"
            )

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("VISION_OUT")

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Keep what dominates, merge the rest."""
        score, n = class_attention(signals), signals.visual.shape[1]
        count = self._contextual(asked)
        order = top_k(score.masked_fill(class_token_mask(signals), torch.inf), asked - count, signals.valid)
        rest = signals.valid & ~rows_to_mask(order, n)
        targets = mask_to_rows(every_nth(rest, count))

        slots = padding_last(torch.cat([ascending(order), targets], dim=1))
        slot = slot_of(slots, n)
        if targets.shape[1]:
            keys = gather_tokens(signals.get("keys").float().mean(dim=1), signals.visual)
            likeness = cosine(targets_of(keys, targets), keys).masked_fill((targets == PAD)[:, :, None], -torch.inf)
            home = slot.gather(1, targets.gather(1, likeness.argmax(dim=1)).clamp(min=0))
            slot = torch.where((slot == PAD) & rest & (count > 0)[:, None], home, slot)
        merge, sizes = merge_assigned(slot, slots.shape[1])
        if (self.merging or ("mean" if self.budget == "exact" else "sum")) == "sum":
            merge = target_plus_mean(slot, slots, sizes)
        return Reduction(
            keep=ascending(slots), size=signals.counts, asked=asked, slots=slots, merge=merge, sizes=sizes,
            score=score.masked_fill(~signals.valid, torch.nan), notes=class_token_note(signals),
        )

    def _contextual(self, asked: Tensor) -> Tensor:
        """`(batch,)` int64: how many of the tokens are contextual."""
        if isinstance(self.contextual, float):
            return (asked.double() * self.contextual + 0.5).floor().long()
        if bool((asked <= self.contextual).any()):
            raise DartLabError(
                f"{self.name}: contextual={self.contextual} of {int(asked.min())} tokens to keep leaves no "
                "dominant one; give fewer, or a share such as 0.15"
            )
        return torch.full_like(asked, self.contextual)


def every_nth(rest: Tensor, count: Tensor) -> Tensor:
    """Evenly spaced tokens among those marked in `rest` `(batch, n)`, `count` `(batch,)` of them: `(batch, n)` bool.

    >>> every_nth(torch.tensor([[True, False, True, True, True, True]]), torch.tensor([2]))
    tensor([[ True, False, False,  True, False, False]])
    """
    place = rest.long().cumsum(dim=1) - 1
    step = (rest.sum(dim=1) // count.clamp(min=1)).clamp(min=1)[:, None]
    return rest & (place % step == 0) & (place // step < count[:, None])


def targets_of(keys: Tensor, targets: Tensor) -> Tensor:
    """Keys of the targets; zeros where there is none."""
    return gather_tokens(keys, targets) * (targets != PAD)[:, :, None]


def target_plus_mean(slot: Tensor, slots: Tensor, sizes: Tensor) -> Merge:
    """Weight 1 for the token that represents a slot, and 1 in all, shared evenly, for the others in it."""
    represents = rows_to_mask(slots, slot.shape[1])
    others = (sizes.gather(1, slot.clamp(min=0)) - 1).clamp(min=1)
    weight = torch.where(represents, 1.0, 1 / others).masked_fill(slot == PAD, 0.0)
    return Merge(slot=slot, source=torch.arange(slot.shape[1], device=slot.device).expand_as(slot), weight=weight)
