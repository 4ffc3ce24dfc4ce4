"""dart-lab: which visual tokens go when a vision-language model is pruned, where they were, and what it costs.

The names below are imported when they are first used, so that `import dart_lab` stays light:

>>> import dart_lab as dl
>>> sorted(set(dl.__all__) & {"load", "prune", "layout"})
['layout', 'load', 'prune']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dart_lab.errors import DartLabError, DartLabWarning, did_you_mean

if TYPE_CHECKING:
    from dart_lab.probes.attention_mass import AttentionMass as AttentionMass
    from dart_lab.tasks import load_task as load_task
    from dart_lab.testing import check_pruner as check_pruner
    from dart_lab.vlm.images import open_image as open_image
    from dart_lab.vlm.insert import prune as prune
    from dart_lab.vlm.load import load as load
    from dart_lab.vlm.locate import layout as layout
    from dart_lab.vlm.recording import record as record
    from dart_lab.vlm.select import select as select

__version__ = "0.1.0"

LAZY = {
    "AttentionMass": "dart_lab.probes.attention_mass",
    "check_pruner": "dart_lab.testing",
    "layout": "dart_lab.vlm.locate",
    "load": "dart_lab.vlm.load",
    "load_task": "dart_lab.tasks",
    "open_image": "dart_lab.vlm.images",
    "prune": "dart_lab.vlm.insert",
    "record": "dart_lab.vlm.recording",
    "select": "dart_lab.vlm.select",
}

#: Packages that may be reached as `dart_lab.pruners` and so on without an import of their own.
ROOMS = ("analysis", "displays", "probes", "pruners", "studies", "tasks", "testing", "vlm")

__all__ = ["DartLabError", "DartLabWarning", "__version__", *LAZY]


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return import_module(f"dart_lab.{name}")
    if name not in LAZY:
        raise AttributeError(f"module 'dart_lab' has no attribute {name!r}. {did_you_mean(name, [*LAZY, *ROOMS])}")
    value = getattr(import_module(LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY, *ROOMS})
