"""A schedule: one method after the other, deeper and deeper in the language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.budget import check_choice, resolve_keep
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.staged import Staged
from dart_lab.pruners.text import parse_stages
from dart_lab.pruners.wrappers import Wrapper, at_layer, check_wraps

ShareOf = Literal["original", "left"]


@dataclass(frozen=True, kw_only=True)
class Schedule(Staged):
    """Methods at several decoder layers; each chooses among the visual tokens that the one before it left.

    Args:
        stages: decoder layer → method, layers strictly increasing, or as text: "2:fastv:0.5;8:dart:0.25" (see
            `parse_pruner`). The layers here replace those of the methods.
        share_of: what a retention ratio is a share of. "original" (default): of the visual tokens the sample had before
            any stage, so that 0.5, then 0.25 keep a half, then a quarter. "left": of those that the stage before left:
            0.5, then 0.25 keep a half, then an eighth.

    Raises `DartLabError` for no stage, layers that do not increase, budgets that grow, and methods that act elsewhere.

    >>> [(part.name, part.layer, part.keep) for part in Schedule("2:fastv:0.5;8:dart:0.25").parts()]
    [('fastv', 2, 0.5), ('dart', 8, 0.25)]
    """

    name: ClassVar[str] = "schedule"

    stages: Mapping[int, Pruner] | tuple[tuple[int, Pruner], ...] | str = field(kw_only=False)
    share_of: ShareOf = "original"
    keep: int | float | None = field(init=False, repr=False, default=None)
    layer: int = field(init=False, repr=False, default=2)
    seed: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_choice(self.name, "share_of", self.share_of, get_args(ShareOf))
        stages = _stages(self.stages)
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "layer", stages[0][0])
        super().__post_init__()
        budgets: dict[type, int | float] = {}
        for layer, method in stages:
            keep = method.keep
            if keep is None or (isinstance(keep, float) and self.share_of == "left"):
                continue
            if keep > budgets.get(type(keep), keep):
                raise DartLabError(
                    f"schedule: keep={keep} at layer {layer} after keep={budgets[type(keep)]}; budgets only shrink"
                )
            budgets[type(keep)] = keep

    def _needs_keep(self) -> bool:
        return False

    def parts(self) -> tuple[Pruner, ...]:
        """The methods in the order of their layers."""
        (_, first), *later = _stages(self.stages)
        if self.share_of == "left":
            return (first, *(method for _, method in later))
        return (first, *(ShareOfOriginal(m) if isinstance(m.keep, float) else m for _, m in later))

    def parameters(self) -> dict[str, Any]:
        """The parameters as a plain dict: layer → method with its name."""
        stages = {layer: {"name": method.name, **method.parameters()} for layer, method in _stages(self.stages)}
        return {"stages": stages, "share_of": self.share_of}


@dataclass(frozen=True, kw_only=True)
class ShareOfOriginal(Wrapper):
    """A method whose retention ratio counts the visual tokens before any stage.

    Raises `DartLabError` where fewer than that are left, and for an official budget given as a ratio.

    >>> import torch
    >>> from dart_lab.pruners import Random
    >>> signals = Signals.of(visual=torch.arange(8)[None], original=torch.tensor([16]))
    >>> ShareOfOriginal(Random(keep=0.25))(signals).counts
    tensor([4])
    """

    verb: ClassVar[str] = "share"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.keep, float) and self.budget != "exact":
            raise DartLabError(
                f"{self.name}: an official budget is a share of what is left; give share_of='left', or keep as a number"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        """The method's own name: what it does is unchanged."""
        return self.pruner.name

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64."""
        if not isinstance(self.keep, float):
            return self.pruner.asked(signals)
        wanted = resolve_keep(self.keep, signals.before)
        if bool((wanted > signals.counts).any()):
            raise DartLabError(
                f"{self.name}: keep={self.keep} of {signals.before.tolist()} visual tokens is more than the "
                f"{signals.counts.tolist()} left at layer {self.layer}"
            )
        return wanted

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """As the method does."""
        return self.pruner.reduce(signals, asked)


def _stages(given: object) -> tuple[tuple[int, Pruner], ...]:
    """Check stages in any of their forms, and move every method to its layer."""
    if isinstance(given, str):
        given = parse_stages(given)
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not pairs:
        raise DartLabError(f"schedule: stages={given!r}: give layer → method, or text like '2:fastv:0.5;8:dart:0.25'")
    for _, method in pairs:
        check_wraps("schedule", method)
        if method.stage.kind != "LLM_LAYER":
            raise DartLabError(f"schedule: {method.name} acts at {method.stage.kind}, not at a decoder layer")
    layers = [layer for layer, _ in pairs]
    if layers != sorted(set(layers)):
        raise DartLabError(f"schedule: layers {layers} must strictly increase")
    return tuple((layer, at_layer(method, layer)) for layer, method in pairs)
