"""Methods by name: this package's own, and those that other packages register."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.pruners.base import Pruner

GROUP = "dart_lab.pruners"  # entry-point group: name = "module:Class"

BUILT_IN: Mapping[str, str] = MappingProxyType({
    "alpha": "dart_lab.pruners.alpha:Alpha",
    "cdpruner": "dart_lab.pruners.cdpruner:CDPruner",
    "dart": "dart_lab.pruners.dart:DART",
    "divprune": "dart_lab.pruners.divprune:DivPrune",
    "elastic-cache": "dart_lab.pruners.elastic_cache:ElasticCache",
    "fastervlm": "dart_lab.pruners.fastervlm:FasterVLM",
    "fastv": "dart_lab.pruners.fastv:FastV",
    "fastv-vis": "dart_lab.pruners.fastv_vis:FastVVis",
    "feature-downsample": "dart_lab.pruners.feature_downsample:FeatureDownsample",
    "ficoco-l": "dart_lab.pruners.ficoco_l:FiCoCoL",
    "ficoco-v": "dart_lab.pruners.ficoco_v:FiCoCoV",
    "hired": "dart_lab.pruners.hired:HiRED",
    "keep-all": "dart_lab.pruners.keep_all:KeepAll",
    "mustdrop": "dart_lab.pruners.mustdrop:MustDrop",
    "none-kept": "dart_lab.pruners.none_kept:NoneKept",
    "pooling": "dart_lab.pruners.pooling:Pooling",
    "prumerge": "dart_lab.pruners.prumerge:PruMerge",
    "pyramiddrop": "dart_lab.pruners.pyramiddrop:PyramidDrop",
    "random": "dart_lab.pruners.random:Random",
    "scope": "dart_lab.pruners.scope:SCOPE",
    "sparsevlm": "dart_lab.pruners.sparsevlm:SparseVLM",
    "tome": "dart_lab.pruners.tome:ToMe",
    "uniform-grid": "dart_lab.pruners.uniform_grid:UniformGrid",
    "uniqueness": "dart_lab.pruners.uniqueness:Uniqueness",
    "v2drop": "dart_lab.pruners.v2drop:V2Drop",
    "visionzip": "dart_lab.pruners.visionzip:VisionZip",
    "vispruner": "dart_lab.pruners.vispruner:VisPruner",
    "vla-pruner": "dart_lab.pruners.vla_pruner:VLAPruner",
    "window-fastv": "dart_lab.pruners.windows:WindowFastV",
})


def registered() -> dict[str, str]:
    """Every known name with its `module:Class`, sorted by name.

    Raises:
        DartLabError: two packages register different classes under one name.

    >>> registered()["dart"]
    'dart_lab.pruners.dart:DART'
    """
    table = dict(BUILT_IN)
    for entry in entry_points(group=GROUP):
        if table.setdefault(entry.name, entry.value) != entry.value:
            raise DartLabError(
                f"the name {entry.name!r} is taken twice, by {table[entry.name]} and by {entry.value}; "
                "one of the packages has to rename its method or be uninstalled"
            )
    return dict(sorted(table.items()))


def pruner_names() -> list[str]:
    """Names that `make_pruner` knows, sorted.

    >>> "uniform-grid" in pruner_names()
    True
    """
    return list(registered())


def pruner_class(name: str) -> type[Pruner]:
    """The class behind a name. Raises `DartLabError` for an unknown name and for a target that is no `Pruner`.

    >>> pruner_class("fastv").__name__
    'FastV'
    """
    table = registered()
    if name not in table:
        raise DartLabError(f"no pruning method is called {name!r}. {did_you_mean(name, table)}")
    module, _, attribute = table[name].partition(":")
    found = getattr(import_module(module), attribute, None)
    if not (isinstance(found, type) and issubclass(found, Pruner)):
        raise DartLabError(f"the method {name!r} points to {table[name]}, which is not a Pruner class")
    return found


def make_pruner(name: str, **parameters: Any) -> Pruner:
    """Build a method from its name and parameters, as the command line does.

    Args:
        name: one of `pruner_names()`.
        parameters: the fields of its dataclass, such as `keep=128`.

    Raises:
        DartLabError: unknown name or parameter (with the nearest right one), or a value out of range.

    >>> make_pruner("random", keep=16, seed=3)
    Random(keep=16, layer=2, seed=3, budget='exact')
    >>> make_pruner("fastv", keep_radio=0.5)
    Traceback (most recent call last):
    dart_lab.errors.DartLabError: fastv has no parameter 'keep_radio'. Did you mean 'keep'? ...
    """
    cls = pruner_class(name)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for parameter in parameters:
        if parameter not in known:
            raise DartLabError(f"{name} has no parameter {parameter!r}. {did_you_mean(parameter, known)}")
    return cls(**parameters)
