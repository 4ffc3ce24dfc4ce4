"""The algebra of pruning: which visual tokens stay. Knows tensors, and no model, file or picture."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dart_lab.pruners.alpha import Alpha
    from dart_lab.pruners.base import BudgetMode, Pruner, ScorePruner, Stage
    from dart_lab.pruners.cdpruner import CDPruner
    from dart_lab.pruners.combine import Then, Union
    from dart_lab.pruners.cost import Cost, ModelShape, cost_of, solve_keep
    from dart_lab.pruners.dart import DART
    from dart_lab.pruners.divprune import DivPrune
    from dart_lab.pruners.elastic_cache import ElasticCache
    from dart_lab.pruners.fastervlm import FasterVLM
    from dart_lab.pruners.fastv import FastV
    from dart_lab.pruners.fastv_vis import FastVVis
    from dart_lab.pruners.feature_downsample import FeatureDownsample
    from dart_lab.pruners.ficoco_l import FiCoCoL
    from dart_lab.pruners.ficoco_v import FiCoCoV
    from dart_lab.pruners.hired import HiRED
    from dart_lab.pruners.keep_all import KeepAll
    from dart_lab.pruners.mustdrop import MustDrop
    from dart_lab.pruners.none_kept import NoneKept
    from dart_lab.pruners.pooling import Pooling
    from dart_lab.pruners.protect import Protect
    from dart_lab.pruners.prumerge import PruMerge
    from dart_lab.pruners.pyramiddrop import PyramidDrop
    from dart_lab.pruners.random import Random
    from dart_lab.pruners.reduction import Reduction
    from dart_lab.pruners.registry import make_pruner, pruner_class, pruner_names
    from dart_lab.pruners.remove import Remove
    from dart_lab.pruners.schedule import Schedule
    from dart_lab.pruners.scope import SCOPE
    from dart_lab.pruners.signals import Signals
    from dart_lab.pruners.sparsevlm import SparseVLM
    from dart_lab.pruners.text import parse_pruner
    from dart_lab.pruners.tome import ToMe, ToMeLLM
    from dart_lab.pruners.uniform_grid import UniformGrid
    from dart_lab.pruners.uniqueness import Uniqueness
    from dart_lab.pruners.v2drop import V2Drop
    from dart_lab.pruners.visionzip import VisionZip
    from dart_lab.pruners.vispruner import VisPruner
    from dart_lab.pruners.vla_pruner import ActionHistory, VLAPruner
    from dart_lab.pruners.windows import Windowed, WindowFastV

_HOME = MappingProxyType({
    "ActionHistory": "vla_pruner",
    "Alpha": "alpha",
    "BudgetMode": "base",
    "CDPruner": "cdpruner",
    "Cost": "cost",
    "DART": "dart",
    "DivPrune": "divprune",
    "ElasticCache": "elastic_cache",
    "FastV": "fastv",
    "FastVVis": "fastv_vis",
    "FasterVLM": "fastervlm",
    "FeatureDownsample": "feature_downsample",
    "FiCoCoL": "ficoco_l",
    "FiCoCoV": "ficoco_v",
    "HiRED": "hired",
    "KeepAll": "keep_all",
    "ModelShape": "cost",
    "MustDrop": "mustdrop",
    "NoneKept": "none_kept",
    "Pooling": "pooling",
    "Protect": "protect",
    "Remove": "remove",
    "PruMerge": "prumerge",
    "Pruner": "base",
    "PyramidDrop": "pyramiddrop",
    "Random": "random",
    "Reduction": "reduction",
    "SCOPE": "scope",
    "Schedule": "schedule",
    "ScorePruner": "base",
    "Signals": "signals",
    "SparseVLM": "sparsevlm",
    "Stage": "base",
    "Then": "combine",
    "ToMe": "tome",
    "ToMeLLM": "tome",
    "UniformGrid": "uniform_grid",
    "Union": "combine",
    "Uniqueness": "uniqueness",
    "V2Drop": "v2drop",
    "VLAPruner": "vla_pruner",
    "VisPruner": "vispruner",
    "VisionZip": "visionzip",
    "WindowFastV": "windows",
    "Windowed": "windows",
    "cost_of": "cost",
    "make_pruner": "registry",
    "parse_pruner": "text",
    "pruner_class": "registry",
    "pruner_names": "registry",
    "solve_keep": "cost",
})

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
