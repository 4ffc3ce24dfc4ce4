"""PyramidDrop: fewer visual tokens at every stage of the language model (arXiv 2410.17247)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner, ScorePruner
from dart_lab.pruners.budget import resolve_keep
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.staged import Staged

Count = int | float
PUBLISHED_LAYERS, PUBLISHED_SHARES = (8, 16, 24), (0.5, 0.25, 0.125)
MATCHED_LAYERS = (2, 10, 20)
DECODER_LAYERS = 32


@dataclass(frozen=True, kw_only=True)
class PyramidDrop(Staged):
    """Cuts at several layers, each by what the last token of the instruction is about to attend to there.

    Args:
        schedule: tokens to keep at each of `layers`: whole numbers, or shares of the tokens before any stage. Without
            `schedule` and `keep`: a half, a quarter, an eighth at layers 8, 16 and 24.
        keep: in place of `schedule`, the average over all `depth` layers, in tokens or as a share: each stage keeps
            half of the one before, and the first as many as that takes.
        layers: decoder layers before which tokens are dropped. Default (8, 16, 24), with `keep` (2, 10, 20).
        depth: decoder layers of the model, for the average. Default 32.
        budget: "exact" rounds shares half up, "official" down.

    Raises `DartLabError` where the average is out of reach: the layers before the first cut run on all tokens.

    >>> [(part.layer, part.keep) for part in PyramidDrop().parts()]
    [(8, 0.5), (16, 0.25), (24, 0.125)]
    >>> halving(192, 576, layers=(2, 10, 20), depth=32)
    (312, 156, 78)

    Differs from the official code in: any batch, left padding, several images and grouped key heads, each of which
    breaks it; only the keys and one query of the layer ahead are computed again, not its values.
    """

    name: ClassVar[str] = "pyramiddrop"
    positions: ClassVar[Literal["compact"]] = "compact"
    paper: ClassVar[str] = "PyramidDrop: Accelerating Your Large Vision-Language Models, arXiv 2410.17247"

    schedule: tuple[Count, ...] | None = None
    layers: tuple[int, ...] | None = None
    depth: int = DECODER_LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and self.schedule is not None:
            raise DartLabError("pyramiddrop: give keep (an average) or schedule (tokens at each layer), not both")
        cuts, stages = self.cuts(), self.stages()
        if len(cuts) != len(stages) or list(cuts) != sorted(set(cuts)):
            raise DartLabError(f"pyramiddrop: layers={cuts} and schedule={stages}: give as many of both, layers rising")
        if self.keep is not None and self.depth <= cuts[-1]:
            raise DartLabError(f"pyramiddrop: depth={self.depth} but a cut at layer {cuts[-1]}: give the model's depth")

    def _needs_keep(self) -> bool:
        return False

    def cuts(self) -> tuple[int, ...]:
        """The layers before which tokens are dropped."""
        return self.layers or (PUBLISHED_LAYERS if self.keep is None else MATCHED_LAYERS)

    def stages(self) -> tuple[Count, ...]:
        """The `keep` of each stage."""
        if self.keep is not None:
            return (self.keep,) * len(self.cuts())
        return self.schedule or PUBLISHED_SHARES

    def parts(self) -> tuple[Pruner, ...]:
        """One cut a layer."""
        average = None if self.keep is None else (*self.cuts(), self.depth)
        return tuple(
            PyramidDropStage(keep=keep, layer=layer, stage_number=i, average_over=average, budget=self.budget)
            for i, (keep, layer) in enumerate(zip(self.stages(), self.cuts(), strict=True))
        )


@dataclass(frozen=True, kw_only=True)
class PyramidDropStage(ScorePruner):
    """One cut of `PyramidDrop` at `layer`, by the attention that this layer is going to pay.

    Args:
        keep: tokens, or share of those before any stage; a stage that has fewer keeps all of them.
        average_over: cuts and depth; `keep` then is the average, of which this is stage `stage_number` (0-based).

    >>> rows = torch.tensor([0.1, 0.4, 0.3, 0.2]).expand(1, 1, 4, 4)
    >>> PyramidDropStage(keep=1)(Signals.of(visual=torch.tensor([[0, 1, 2]]), attention_ahead=rows)).keep
    tensor([[1]])
    """

    name: ClassVar[str] = "pyramiddrop-stage"
    needs: ClassVar[frozenset[str]] = frozenset({"attention_ahead"})
    positions: ClassVar[Literal["compact"]] = "compact"

    stage_number: int = 0
    average_over: tuple[int, ...] | None = None

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64."""
        before, keep = signals.before, 1.0 if self.keep is None else self.keep
        if self.average_over is not None:
            *layers, depth = self.average_over
            plans = [
                halving(keep * n if isinstance(keep, float) else keep, n, layers=tuple(layers), depth=depth)
                for n in before.tolist()
            ]
            wanted = torch.tensor([plan[self.stage_number] for plan in plans], device=before.device)
        elif isinstance(keep, float):
            official = (before.double() * keep).floor().long()
            wanted = official if self.budget == "official" else resolve_keep(keep, before)
        else:
            wanted = torch.full_like(before, keep)
        return wanted.minimum(signals.counts)

    def score(self, signals: Signals) -> Tensor:
        """`(batch, n)`: attention of the prompt's last token, mean over heads."""
        return signals.attention_to_visual(signals.last[:, None], of="attention_ahead").mean(dim=1)[:, 0]


def halving(average: float, tokens: int, *, layers: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Tokens at each stage, each half of the one before, so that all `depth` layers together process the average.

    Counts are rounded down to a multiple that halves without rest, at least 1 in the last stage; none exceeds `tokens`.

    Raises:
        DartLabError: the layers before the first cut alone cost as much, or a stage would keep more than all tokens.
    """
    widths = [end - start for start, end in zip(layers, (*layers[1:], depth), strict=True)]
    spent = layers[0] * tokens
    each = sum(width * 2 ** (len(layers) - 1 - i) for i, width in enumerate(widths))  # cost of 1 in the last stage
    last = int((average * depth - spent) // each)
    if last < 1:
        least = (spent + each) / depth
        raise DartLabError(
            f"pyramiddrop: an average of {average:g} over {depth} layers is out of reach with {tokens} tokens in the "
            f"first {layers[0]}; give at least {least:.1f}, or an earlier first layer"
        )
    return tuple(min(tokens, last * 2 ** (len(layers) - 1 - i)) for i in range(len(layers)))
