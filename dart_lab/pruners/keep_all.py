"""Keep-all: the condition without pruning, run through the same machinery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals


@dataclass(frozen=True, kw_only=True)
class KeepAll(Pruner):
    """Keep every visual token: the model as it is.

    Takes no `keep`; raises `DartLabError` if one is given.

    >>> import torch
    >>> KeepAll()(Signals.of(visual=torch.arange(3)[None])).keep
    tensor([[0, 1, 2]])

    Differs from the official code in: there is none.
    """

    name: ClassVar[str] = "keep-all"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None:
            raise DartLabError(f"keep-all: keep={self.keep}: this condition keeps everything; leave keep out")

    def _needs_keep(self) -> bool:
        return False

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: all of each sample's visual tokens."""
        return signals.counts

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Every valid token."""
        return Reduction.from_mask(signals.valid, signals.counts, asked=asked)
