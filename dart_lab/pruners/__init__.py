"""The algebra of pruning: which visual tokens stay. Knows tensors, and no model, file or picture."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dart_lab.pruners.base import BudgetMode, Pruner, ScorePruner, Stage
    from dart_lab.pruners.dart import DART
    from dart_lab.pruners.fastv import FastV
    from dart_lab.pruners.fastv_vis import FastVVis
    from dart_lab.pruners.keep_all import KeepAll
    from dart_lab.pruners.none_kept import NoneKept
    from dart_lab.pruners.random import Random
    from dart_lab.pruners.reduction import Reduction
    from dart_lab.pruners.registry import make_pruner, pruner_class, pruner_names
    from dart_lab.pruners.signals import Signals
    from dart_lab.pruners.uniform_grid import UniformGrid

_HOME = MappingProxyType({
    "BudgetMode": "base",
    "DART": "dart",
    "FastV": "fastv",
    "FastVVis": "fastv_vis",
    "KeepAll": "keep_all",
    "NoneKept": "none_kept",
    "Pruner": "base",
    "Random": "random",
    "Reduction": "reduction",
    "ScorePruner": "base",
    "Signals": "signals",
    "Stage": "base",
    "UniformGrid": "uniform_grid",
    "make_pruner": "registry",
    "pruner_class": "registry",
    "pruner_names": "registry",
})

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
