"""How much of the foreground each pruning method keeps on ``tiny``: a description of the methods, never a criterion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dart_lab.tasks import Sample

METHODS = ("Random", "UniformGrid", "FastV", "DART")


def foreground_recall(
    folder: Path,
    groups: Sequence[Sequence[Sample]],
    foreground: Sequence[np.ndarray],
    budgets: Sequence[int],
    layer: int,
) -> dict[str, dict[str, float]]:
    """Share of the foreground's tokens that a method keeps, in percent, mean over pictures; by method and budget.

    Args:
        folder: an exported checkpoint.
        groups: samples of each picture; the families take turns, one question a picture.
        foreground: (patches,) bool of each picture.
        budgets: numbers of visual tokens to keep.
        layer: layer before which they are dropped.
    """
    import dart_lab
    from dart_lab import pruners

    vlm = dart_lab.load(str(folder))
    prepared = [
        vlm.prepare([group[0].image], [group[number % len(group)].question]) for number, group in enumerate(groups)
    ]
    found: dict[str, dict[str, float]] = {}
    for method in METHODS:
        for budget in budgets:
            pruner = getattr(pruners, method)(keep=budget, layer=layer)
            shares = []
            for inputs, shown in zip(prepared, foreground, strict=True):
                with dart_lab.prune(vlm.model, pruner) as run:
                    vlm.model(**inputs)
                kept = np.zeros(len(shown), dtype=bool)
                kept[run.kept[0]] = True
                shares.append(100.0 * float(kept[shown].mean()))
            found.setdefault(method, {})[str(budget)] = round(float(np.mean(shares)), 1)
    return found
