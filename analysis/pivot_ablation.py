"""`dart-lab figure pivot-ablation`: DART's pivots by choice, number, modality (arXiv 2502.11494, Table 8, Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.curves import Dots, caption, dots_height, draw_dots
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.dart import DART
from dart_lab.pruners.random import Random
from dart_lab.studies.plan import UNPRUNED
from dart_lab.studies.scores import score_table

from .sweep import Bench, interval, open_bench

KEEP = (64,)
SAMPLES = 140
OVERLAP_SAMPLES = 28  # questions on which kept sets are compared
CHOICES = ("k_norm", "v_norm", "attention")
NUMBERS = (1, 2, 4, 8, 16)
#: Published averages of LLaVA-1.5-7B at 128 tokens, percent of the unpruned score (arXiv 2502.11494, Table 8).
PUBLISHED: Mapping[str, float] = {
    "k_norm largest": 96.8,
    "k_norm smallest": 96.8,
    "v_norm largest": 94.9,
    "v_norm smallest": 97.2,
    "attention largest": 96.9,
    "attention smallest": 96.7,
    "random": 96.0,
}
GROUPS = {"choice": "Pivot choice", "number": "Image + text pivots", "modality": "Modality"}


def variants(keep: int, layer: int, seed: int) -> dict[str, dict[str, DART]]:
    """Group → label → DART with other pivots."""

    def dart(**more: Any) -> DART:
        return DART(keep=keep, layer=layer, seed=seed, **more)

    choice = {"random": dart(pivots="random")}
    for name in CHOICES:
        choice |= {f"{name} largest": dart(pivots=name), f"{name} smallest": dart(pivots=name, largest=False)}
    number = {f"{n} + {n}": dart(image_pivots=n, text_pivots=n) for n in NUMBERS if 2 * n <= keep}
    modality = {
        "image and text": dart(),
        "image only": dart(image_pivots=8, text_pivots=0),
        "text only": dart(image_pivots=0, text_pivots=8),
    }
    return {"choice": choice, "number": number, "modality": modality}


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer every question with every kind of pivots, and compare what they keep.

    Args:
        options: `keep` defaults to 64, `n` to 140 questions.
        progress: show a progress bar on stderr.

    Raises:
        DartLabError: several budgets, or methods other than dart.
    """
    if options.methods not in (None, ("dart",)):
        raise DartLabError("pivot-ablation is about dart; leave --methods out")
    bench = open_bench(options, n=SAMPLES, keep=KEEP)
    if len(bench.options.keep or ()) != 1:
        raise DartLabError(f"pivot-ablation is about one budget, got {list(bench.options.keep or ())}; give --keep 64")
    keep = int((bench.options.keep or KEEP)[0])
    groups = variants(keep, bench.options.layer, bench.options.seed)
    conditions: dict[str, Pruner | None] = {UNPRUNED: None}
    conditions["random tokens"] = Random(keep=keep, layer=bench.options.layer, seed=bench.options.seed)
    for group, own in groups.items():
        conditions |= {f"{group}: {label}": pruner for label, pruner in own.items()}
    records = bench.answers(conditions, progress)
    facts = {
        **bench.facts("pivot-ablation"), "keep": keep, "overlap": overlap(bench, groups["choice"]),
        **measure(records, seed=bench.options.seed), "published": dict(PUBLISHED),
    }  # fmt: skip
    return FigureData(records, facts)


def measure(records: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """Accuracy of every kind of pivots.

    Returns:
        `groups`: group → label → value, low, high; `levels`: unpruned and random tokens → value; `images`.
    """
    table = score_table(records, seed=seed, n_boot=n_boot).set_index("condition")
    groups: dict[str, dict[str, Any]] = {}
    levels = {}
    for condition, row in table.iterrows():
        group, colon, label = str(condition).partition(": ")
        if colon:
            groups.setdefault(group, {})[label] = interval(row)
        else:
            levels[str(condition)] = float(row["value"])
    return {"groups": groups, "levels": levels, "images": int(records["image_id"].nunique())}


def overlap(bench: Bench, pruners: Mapping[str, DART]) -> dict[str, Any]:
    """Jaccard overlap of the kept sets of every two choices, mean over questions; and what chance gives.

    Chance: two independent uniform sets of k of n tokens share k²/n on average, a Jaccard of about k / (2n − k).
    """
    from dart_lab.vlm.select import select

    labels, total, count = list(pruners), np.zeros((len(pruners), len(pruners))), 0
    size = bench.options.batch_size
    samples = bench.task[: min(OVERLAP_SAMPLES, len(bench.task))]
    kept_tokens = 0
    for start in range(0, len(samples), size):
        batch = samples[start : start + size]
        inputs = bench.vlm.prepare([sample.image for sample in batch], [sample.question for sample in batch])
        runs = select(bench.vlm, inputs, list(pruners.values()))
        for number in range(len(batch)):
            sets = [set(run.kept[number].tolist()) for run in runs]
            total += [[len(a & b) / len(a | b) for b in sets] for a in sets]
            kept_tokens, count = len(sets[0]), count + 1
    chance = kept_tokens / (2 * bench.depth.visual - kept_tokens)
    return {"labels": labels, "jaccard": (total / count).tolist(), "chance": chance, "questions": count}


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Accuracy of every kind of pivots, and the least and largest overlap."""
    out = [
        f"{group}, {label}: {100 * y['value']:.1f} % [{100 * y['low']:.1f}, {100 * y['high']:.1f}]"
        for group, own in facts["groups"].items()
        for label, y in own.items()
    ]
    jaccard = np.array(facts["overlap"]["jaccard"])
    apart = jaccard[~np.eye(len(jaccard), dtype=bool)]
    chance = facts["overlap"]["chance"]
    return [*out, f"overlap of kept sets: {apart.min():.2f} to {apart.max():.2f} (chance {chance:.2f})"]


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Accuracies in three panels, and the overlap of kept sets."""
    groups = {name: facts["groups"][name] for name in GROUPS if name in facts["groups"]}
    heights = [dots_height(Dots("", "", own, ("",))) for own in groups.values()]
    width, height = 8.6, 1.0 + sum(heights) + 0.75 * len(heights) + 0.8
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        len(groups), 1, left=1.35 / width, right=3.9 / width, top=1 - 0.95 / height, bottom=1.0 / height,
        height_ratios=heights, hspace=0.75,
    )  # fmt: skip
    spread = [100 * y[end] for own in groups.values() for y in own.values() for end in ("low", "high")]
    spread += [100 * level for level in facts["levels"].values()]
    for i, (name, own) in enumerate(groups.items()):
        axes = figure.add_subplot(grid[i, 0])
        panel = Dots(GROUPS[name], "right answers (%)", {label: [y] for label, y in own.items()}, (name,))
        draw_dots(axes, panel)
        for row, label in enumerate(own):
            if name == "choice" and label in facts["published"]:
                axes.text(
                    1.02, row, f"{facts['published'][label]:.1f}", transform=axes.get_yaxis_transform(), va="center",
                    fontsize=7.5, color="#555555",
                )  # fmt: skip
        for level, style in zip(facts["levels"].values(), ("-", ":"), strict=False):
            axes.axvline(100 * level, color="#9A9A9A", linestyle=style, linewidth=1.1)
        axes.set_xlim(min(spread) - 2, max(spread) + 2)
        if i < len(groups) - 1:
            axes.set_xlabel("")
    _draw_overlap(figure, facts["overlap"], width, height)
    figure.suptitle(f"DART's pivots, keep {facts['keep']}", x=0.02, ha="left", y=1 - 0.12 / height)
    rest = (
        "Lines: unpruned (solid), random tokens (dotted). Grey numbers: published averages of LLaVA-1.5-7B at 128 "
        "tokens, % of unpruned (arXiv 2502.11494).\nRight: Jaccard overlap of the kept sets, mean over "
        f"{facts['overlap']['questions']} questions; two random sets: {facts['overlap']['chance']:.2f}."
    )
    figure.text(0.02, 0.1 / height, caption(facts, rest), fontsize=7.5, va="bottom")
    return figure


def _draw_overlap(figure: Figure, overlap: Mapping[str, Any], width: float, height: float) -> None:
    jaccard, labels = np.array(overlap["jaccard"]), overlap["labels"]
    axes = figure.add_axes((5.35 / width, 2.0 / height, 3.0 / width, 3.0 / height))
    axes.imshow(jaccard, cmap="cividis", vmin=0, vmax=1)
    for i, j in np.ndindex(jaccard.shape):
        colour = "black" if jaccard[i, j] > 0.5 else "white"
        axes.text(j, i, f"{jaccard[i, j]:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=7.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
    axes.set_title("Overlap of kept sets")


FIGURE = FigureSpec(
    name="pivot-ablation",
    summary="DART by pivot choice, number and modality, and how much their kept sets overlap",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
)
