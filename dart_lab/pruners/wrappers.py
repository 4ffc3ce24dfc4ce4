"""What all wrappers share: they take a method, stand for it, and change one thing about it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import BudgetMode, PositionPolicy, Pruner, ScorePruner, Stage
from dart_lab.pruners.reduction import PAD, Reduction, gather_tokens, mask_to_rows, rows_to_mask
from dart_lab.pruners.signals import Signals

_SAME: Any = None  # the wrapped method's own


@dataclass(frozen=True, kw_only=True)
class Wrapper(Pruner):
    """A method made of another: same stage, same signals, same budget, unless the subclass says otherwise.

    Args:
        pruner: the wrapped method.
        keep, layer, seed, budget: those of the wrapped method; given here, they replace its own.

    Subclasses set `verb`, which names the result: "window" of "fastv" is "window-fastv".
    """

    verb: ClassVar[str]

    pruner: Pruner = field(kw_only=False)
    layer: int = _SAME
    seed: int = _SAME
    budget: BudgetMode = _SAME

    def __post_init__(self) -> None:
        check_wraps(self.verb, self.pruner)
        shared = ("keep", "layer", "seed", "budget")
        given = {name: getattr(self, name) for name in shared if getattr(self, name) is not None}
        if any(repr(value) != repr(getattr(self.pruner, name)) for name, value in given.items()):  # 1 is not 1.0
            object.__setattr__(self, "pruner", dataclasses.replace(self.pruner, **given))
        for name in shared:
            object.__setattr__(self, name, getattr(self.pruner, name))
        super().__post_init__()

    def _needs_keep(self) -> bool:
        return False  # the wrapped method has checked its own

    @property
    def name(self) -> str:  # type: ignore[override]
        """What was done to which method."""
        return f"{self.verb}-{self.pruner.name}"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The signals of the wrapped method."""
        return self.pruner.needs

    @property
    def positions(self) -> PositionPolicy:  # type: ignore[override]
        """The wrapped method's policy."""
        return self.pruner.positions

    @property
    def rerank(self) -> bool:
        """Whether the wrapped method ranks anew at every decode step."""
        return bool(getattr(self.pruner, "rerank", False))

    @property
    def stage(self) -> Stage:
        """Where the wrapped method acts."""
        return self.pruner.stage

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: what the wrapped method is asked for."""
        return self.pruner.asked(signals)

    def parameters(self) -> dict[str, Any]:
        """The parameters as a plain dict, wrapped methods with their names."""
        return parameters(self)


def parameters(pruner: Pruner) -> dict[str, Any]:
    """The fields of a method made of others; each of the others becomes a dict of its own, with its name first."""
    fields = {f.name: getattr(pruner, f.name) for f in dataclasses.fields(pruner)}
    return {
        name: {"name": value.name, **value.parameters()} if isinstance(value, Pruner) else value
        for name, value in fields.items()
    }


def check_wraps(verb: str, pruner: object) -> None:
    """Raise `DartLabError` unless this is a method with a single stage."""
    if not isinstance(pruner, Pruner):
        raise DartLabError(f"{verb}: got {pruner!r}; give a method, such as FastV(keep=64)")
    if len(pruner.parts()) != 1:
        raise DartLabError(f"{verb}: {pruner.name} has {len(pruner.parts())} stages; wrap one of its parts()")


def check_ranks(verb: str, pruner: Pruner) -> None:
    """Raise `DartLabError` unless the method ranks tokens."""
    if not isinstance(pruner, ScorePruner):
        raise DartLabError(f"{verb}: {pruner.name} gives no score to rank by; give a method that does, such as fastv")


def at_layer(pruner: Pruner, layer: int) -> Pruner:
    """The same method, and the methods it is made of, at another decoder layer.

    >>> from dart_lab.pruners import Random
    >>> at_layer(Random(keep=8), 5).layer
    5
    """
    changes: dict[str, Any] = {}
    for field_ in dataclasses.fields(pruner):
        value = getattr(pruner, field_.name)
        if isinstance(value, Pruner):
            changes[field_.name] = at_layer(value, layer)
        elif field_.name == "layer" and field_.init:
            changes["layer"] = layer
    return dataclasses.replace(pruner, **changes)


def narrowed(signals: Signals, stay: Tensor) -> Signals:
    """The same signals as if only these visual tokens were there: `stay` is `(batch, n)` bool.

    States and attention are those computed with all tokens; only which tokens count as visual, and as real, changes.
    """
    rows = mask_to_rows(stay & signals.valid)
    gone = signals.visual.masked_fill(stay | ~signals.valid, PAD)
    grid = signals.grid
    if grid is not None:
        grid = gather_tokens(grid, rows).masked_fill((rows == PAD)[:, :, None], PAD)
    return dataclasses.replace(
        signals,
        visual=signals.visual.gather(1, rows.clamp(min=0)).masked_fill(rows == PAD, PAD),
        attended=signals.attended & ~rows_to_mask(gone, signals.attended.shape[1]),
        grid=grid,
        original=signals.before,
    )


def through(numbers: Tensor, rows: Tensor) -> Tensor:
    """Turn rows that index `numbers` `(batch, n)` into those numbers; -1 stays: `(batch, m)` → `(batch, m)`."""
    return numbers.gather(1, rows.clamp(min=0)).masked_fill(rows == PAD, PAD) if rows.numel() else rows


def dropping_only(method: str, reduction: Reduction) -> Reduction:
    """The reduction itself; `DartLabError` if it merges tokens or puts them in another order."""
    if reduction.merge is not None or reduction.slots is not None:
        raise DartLabError(f"{method}: the wrapped method merges or reorders tokens; it must only drop them")
    return reduction
