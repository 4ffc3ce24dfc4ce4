"""Random: the baseline that every method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.selectors import ascending
from dart_lab.pruners.signals import Signals


@dataclass(frozen=True, kw_only=True)
class Random(Pruner):
    """Keep a uniformly drawn subset: every subset of the asked size is equally likely.

    Args:
        keep: visual tokens to keep, or retention ratio.
        seed: same seed and sample, same subset, whatever the batch; another seed, an independent draw.

    >>> signals = Signals.of(visual=torch.arange(8)[None])
    >>> bool(torch.equal(Random(keep=3)(signals).keep, Random(keep=3)(signals).keep))
    True

    Differs from the official code in: EPIC and LightCompress draw from one generator that lives as long as the process,
    so that a sample's subset depends on what ran before; here each sample has its own generator. They also round the
    number down (EPIC) or to even (LightCompress).
    """

    name: ClassVar[str] = "random"
    needs: ClassVar[frozenset[str]] = frozenset()

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Draw each sample's subset from its own generator."""
        order = torch.full((len(asked), int(asked.max())), PAD, dtype=torch.int64)
        for row, (n, m) in enumerate(zip(signals.counts.tolist(), asked.tolist(), strict=True)):
            order[row, :m] = torch.randperm(n, generator=signals.generator(row, self.seed))[:m]
        order = order.to(signals.visual.device)
        return Reduction(keep=ascending(order), size=signals.counts, asked=asked, order=order)
