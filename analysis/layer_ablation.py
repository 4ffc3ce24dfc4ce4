"""`dart-lab figure layer-ablation`: what it costs to prune before layer K, for every K, all tokens dropped included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dart_lab.displays.curves import Curve, Panel, caption, draw_curves
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.registry import make_pruner
from dart_lab.studies.plan import NONE_KEPT, UNPRUNED
from dart_lab.studies.scores import score_table

from .sweep import interval, open_bench

KEEP = (64,)
METHODS = ("dart", "fastv", "random")
SAMPLES = 140


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer every question with the cut before every layer.

    Args:
        options: `methods` default to dart, fastv and random, `keep` to 64, `n` to 140 questions; `layer` is not used.
        progress: show a progress bar on stderr.

    Raises:
        DartLabError: a method that does not cut once inside the decoder.
    """
    bench = open_bench(options, n=SAMPLES, keep=KEEP, methods=METHODS)
    o = bench.options
    conditions: dict[str, Pruner | None] = {UNPRUNED: None}
    for layer in range(1, bench.depth.layers):
        conditions[f"{NONE_KEPT}@0@{layer}"] = make_pruner("none-kept", layer=layer)
        for name in o.methods or ():
            for keep in o.keep or ():
                pruner = make_pruner(name, keep=keep, layer=layer, seed=o.seed)
                if [(part.stage.kind, part.stage.layer) for part in pruner.parts()] != [("LLM_LAYER", layer)]:
                    raise DartLabError(f"{name} does not cut once before a decoder layer; leave it out")
                conditions[f"{name}@{keep}@{layer}"] = pruner
    records = bench.answers(conditions, progress)
    return FigureData(records, {**bench.facts("layer-ablation"), **measure(records, seed=o.seed)})


def measure(records: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """Accuracy by method, budget and layer, overall and by family.

    Args:
        records: with conditions "method@keep@K" and "unpruned".
        seed: of the bootstrap.
        n_boot: resamples of pictures. Default 1000.

    Returns:
        `curves`: label → `layers`, `all` and families (value, low, high for each layer); `unpruned`: family → value.
    """
    families = list(dict.fromkeys(records["family"]))
    tables = {
        "all": score_table(records, seed=seed, n_boot=n_boot),
        **{family: score_table(records[records["family"] == family], seed=seed, n_boot=n_boot) for family in families},
    }
    curves: dict[str, Any] = {}
    unpruned: dict[str, float] = {}
    for family, table in tables.items():
        for _, row in table.iterrows():
            if row["condition"] == UNPRUNED:
                unpruned[family] = float(row["value"])
                continue
            method, keep, layer = row["condition"].rsplit("@", 2)
            label = method if method == NONE_KEPT else f"{method} {keep}"
            curve = curves.setdefault(label, {"layers": []})
            curve.setdefault(family, []).append(interval(row))
            if family == "all":
                curve["layers"].append(int(layer))
    return {
        "families": families, "curves": curves, "unpruned": unpruned, "images": int(records["image_id"].nunique()),
    }  # fmt: skip


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Accuracy over K for every curve."""
    return [
        f"{label}: " + ", ".join(
            f"K={layer} {100 * y['value']:.1f} %" for layer, y in zip(curve["layers"], curve["all"], strict=True)
        )
        for label, curve in facts["curves"].items()
    ]  # fmt: skip


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Any:
    """A panel for all questions, and for the families that suffer most and least from a cut at the first layer."""
    first = {
        family: facts["unpruned"][family] - facts["curves"][NONE_KEPT][family][0]["value"]
        for family in facts["families"]
    }
    ends = [max(first, key=lambda f: first[f]), min(first, key=lambda f: first[f])] if len(first) > 1 else []
    panels = [
        Panel(
            "all questions" if family == "all" else family, "K, first layer on the short sequence", "right answers (%)",
            [Curve(label, curve["layers"], curve[family]) for label, curve in facts["curves"].items()],
            {"unpruned": facts["unpruned"][family]},
        )
        for family in ["all", *ends]
    ]  # fmt: skip
    rest = (
        "None kept: every visual token dropped before layer K; where it meets the unpruned line, the picture has been "
        "read.\nThe families shown lose most and least when nothing is kept from layer 1 on."
    )
    return draw_curves(panels, title="Pruning before layer K", caption=caption(facts, rest))


FIGURE = FigureSpec(
    name="layer-ablation",
    summary="accuracy against the layer before which tokens are dropped, all tokens dropped included",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
)
