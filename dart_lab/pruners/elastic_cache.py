"""Elastic Cache: merge the KV cache into its most attended slots once the prompt has run (arXiv 2407.18121)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.pruners.assignment import merge_assigned
from dart_lab.pruners.base import Pruner, Stage
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.selectors import ascending, top_k
from dart_lab.pruners.signals import Signals


@dataclass(frozen=True, kw_only=True)
class ElasticCache(Pruner):
    """In every layer but the first, the most attended slots are anchors; each takes the mean of its neighbourhood.

    The slots are split half way between neighbouring anchors; keys and values of a bucket are averaged. Importance is
    what a slot receives from all queries, mean over heads. The prompt's first and last token are always anchors.

    Args:
        keep: anchors, or their share of the prompt's slots, text included.
        first: the first layer whose cache is reduced, at least 1. Default 1: layer 0 keeps its cache, because the model
            takes positions and masks of later tokens from its length.

    >>> signals = Signals.of(visual=torch.arange(5)[None], received=torch.tensor([[5.0, 1.0, 4.0, 1.0, 0.0]]))
    >>> ElasticCache(keep=3)(signals).weights()[0]
    tensor([[0.5000, 0.5000, 0.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000, 1.0000]])

    Differs from the official code in: it ranks importance by one argsort where a rank needs two, so that what it gives
    up is close to a random choice; here the least attended slots go. A slot half way between two anchors joins the
    earlier one. Layer 0 is left whole. The elimination of one slot for every new token is not part of this: only the
    prompt is reduced.
    """

    name: ClassVar[str] = "elastic-cache"
    needs: ClassVar[frozenset[str]] = frozenset({"received"})
    whole_cache: ClassVar[bool] = True
    paper: ClassVar[str] = "Efficient Inference of VLMs with Elastic Cache, arXiv 2407.18121"

    first: int = 1

    @property
    def stage(self) -> Stage:
        """Behind the prompt, in the caches of the layers from `first` on."""
        return Stage("POST_PREFILL_CACHE", self.first)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Anchors, then buckets."""
        received = signals.get("received").gather(1, signals.visual.clamp(min=0))
        first = signals.attended.long().argmax(dim=1)[:, None]
        ends = (signals.visual == first) | (signals.visual == signals.last[:, None])
        order = top_k(received.float().masked_fill(ends, math.inf), asked, signals.valid)
        anchors = ascending(order)
        merge, sizes = merge_assigned(buckets(anchors, signals.valid), anchors.shape[1])
        return Reduction(
            keep=anchors, size=signals.counts, asked=asked, order=order, merge=merge, sizes=sizes,
            score=received.float().masked_fill(~signals.valid, math.nan),
        )


def buckets(anchors: Tensor, valid: Tensor) -> Tensor:
    """The nearest anchor of every place, by distance along the axis, the earlier of two as near.

    Args:
        anchors: `(batch, m)` int64, ascending, padded with -1.
        valid: `(batch, n)` bool.

    Returns:
        `(batch, n)` int64, which anchor; -1 at padding.

    >>> buckets(torch.tensor([[0, 4]]), torch.ones(1, 6, dtype=torch.bool))
    tensor([[0, 0, 0, 1, 1, 1]])
    """
    place = torch.arange(valid.shape[1], device=valid.device)
    middle = torch.where(anchors[:, 1:] == PAD, 2 * valid.shape[1], anchors[:, 1:] + anchors[:, :-1]).contiguous()
    home = torch.searchsorted(middle, (2 * place).expand(len(anchors), -1).contiguous())  # passed strictly
    return home.masked_fill(~valid, PAD)
