"""None-kept: the condition without any visual token, the floor of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals


@dataclass(frozen=True, kw_only=True)
class NoneKept(Pruner):
    """Drop every visual token at layer K. What the layers before K moved into the text stays there.

    Takes no `keep`; raises `DartLabError` if one is given.

    >>> NoneKept()(Signals.of(visual=torch.arange(8)[None])).counts
    tensor([0])

    Differs from the official code in: there is none.
    """

    name: ClassVar[str] = "none-kept"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None:
            raise DartLabError(f"none-kept: keep={self.keep}: this condition keeps nothing; leave keep out")

    def _needs_keep(self) -> bool:
        return False

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: zeros."""
        return torch.zeros_like(signals.counts)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """An empty row for each sample."""
        return Reduction.from_mask(torch.zeros_like(signals.valid), signals.counts, asked=asked)
