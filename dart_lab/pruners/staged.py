"""Methods that act in several places."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner, Stage
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals


class Staged(Pruner):
    """A method of several stages: implements `parts`; whoever inserts it runs each part at its own stage.

    Called directly it decides only if it has one part; otherwise `DartLabError`.
    """

    @abstractmethod
    def parts(self) -> tuple[Pruner, ...]:
        """The single-stage methods, in the order of their stages."""

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Signals that any of the parts asks for."""
        return frozenset().union(*(part.needs for part in self.parts()))

    @property
    def stage(self) -> Stage:
        """Where the first part acts."""
        return self.parts()[0].stage

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: what its only part is asked for."""
        return self._only().asked(signals)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """What its only part decides."""
        return self._only().reduce(signals, asked)

    def _only(self) -> Pruner:
        parts = self.parts()
        if len(parts) != 1:
            raise DartLabError(f"{self.name} acts in {len(parts)} stages; run each of its parts() at its own stage")
        return parts[0]


def spread(total: int, steps: int) -> tuple[int, ...]:
    """Spread `total` evenly over `steps`, the larger shares first.

    >>> spread(384, 23)[15:17]
    (17, 16)
    """
    return tuple(total // steps + (step < total % steps) for step in range(steps))
