"""`dart-lab figure error-bound`: DART's Lemma and Theorem (arXiv 2502.11494, section 3) on a model's real states.

Lemma: if every dropped token has a cosine of at least ε with a pivot, the Hausdorff distance between all tokens and the
kept ones is at most √(2(1 − ε))·B, B being the largest norm. Theorem: the output moves by at most K times that, for an
output that is K-Lipschitz in that distance. The Lemma needs equal norms, which real states do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.displays.style import CHANCE, PALETTE
from dart_lab.pruners.dart import DART
from dart_lab.studies.bootstrap import bootstrap_sums

from .sweep import Bench, interval, open_bench

KEEP = (256, 128, 64, 32)
SAMPLES = 70


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Measure distance, bound and what the output does, for every question and budget.

    Args:
        options: `keep` defaults to four budgets, `n` to 70 questions.
        progress: show a progress bar on stderr.
    """
    bench = open_bench(options, n=SAMPLES, keep=KEEP)
    table = collect(bench, progress)
    return FigureData(table, {**bench.facts("error-bound"), **measure(table, seed=bench.options.seed)})


def collect(bench: Bench, progress: bool) -> pd.DataFrame:
    """One row a question and budget: `hausdorff`, `bound`, `equal_norms`, and `moved`: how far the last token's final
    state moves, as a share of its length.
    """
    from tqdm import tqdm

    from dart_lab.vlm.final import final_states
    from dart_lab.vlm.insert import prune

    rows = []
    size, o = bench.options.batch_size, bench.options
    for start in tqdm(range(0, len(bench.task), size), desc="questions", unit="batch", disable=not progress):
        batch = bench.task[start : start + size]
        inputs = bench.vlm.prepare([sample.image for sample in batch], [sample.question for sample in batch])
        whole = final_states(bench.vlm, inputs)
        for keep in o.keep or ():
            with prune(bench.vlm, DART(keep=int(keep), layer=o.layer, certificate=True)) as run:
                short = final_states(bench.vlm, inputs)
            moved = (short - whole).norm(dim=1) / whole.norm(dim=1)
            for number, sample in enumerate(batch):
                notes = run.notes(number)
                rows.append(
                    {
                        "sample": sample.id, "image_id": sample.image_id or sample.id, "keep": int(keep),
                        **{name: float(notes[name]) for name in ("hausdorff", "hausdorff_visual", "bound", "margin")},
                        "equal_norms": bool(notes["equal_norms"]), "moved": float(moved[number]),
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def measure(table: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """How often the bound holds and how tight it is, and what the output does.

    Args:
        table: rows of `collect`.
        seed: of the bootstrap.
        n_boot: resamples of pictures. Default 1000.

    Returns:
        `budgets`: one entry a budget with `tightness` (distance / bound) and `moved` (value, low, high), `violated` and
        `equal_norms` (share of questions), `lipschitz` (largest moved / distance seen); `correlation` of distance and
        movement over all rows; `images`.
    """
    budgets = []
    for keep, part in table.groupby("keep", sort=True):
        ratio = (part["hausdorff"] / part["bound"]).to_numpy()
        counted = np.column_stack([ratio, part["moved"], np.ones(len(part))])
        means = bootstrap_sums(
            counted, part["image_id"].to_numpy(), lambda s: s[..., :2] / s[..., 2:], n_boot=n_boot, seed=seed
        )  # fmt: skip
        budgets.append(
            {
                "keep": int(str(keep)), "tightness": interval(means.iloc[0]), "moved": interval(means.iloc[1]),
                "violated": float((ratio > 1).mean()), "equal_norms": float(part["equal_norms"].mean()),
                "lipschitz": float((part["moved"] / part["hausdorff"].where(part["hausdorff"] > 0)).max()),
            }
        )  # fmt: skip
    distance, moved = table["hausdorff"].to_numpy(), table["moved"].to_numpy()
    related = float(np.corrcoef(distance, moved)[0, 1]) if distance.std() > 0 and moved.std() > 0 else 0.0
    return {"budgets": budgets, "correlation": related, "images": int(table["image_id"].nunique())}


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Tightness, violations and movement of every budget."""
    return [
        f"keep {row['keep']}: distance is {100 * row['tightness']['value']:.0f} % of the bound, which is violated on "
        f"{100 * row['violated']:.1f} % of questions (equal norms on {100 * row['equal_norms']:.0f} %); the last "
        f"token's state moves by {100 * row['moved']['value']:.1f} % of its length"
        for row in facts["budgets"]
    ] + [f"correlation of distance and movement: {facts['correlation']:+.2f}"]


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Distance against bound, and movement against distance, a dot a question and budget."""
    figure = Figure(figsize=(8.0, 4.4))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.83, bottom=0.27, wspace=0.25)
    for i, (keep, part) in enumerate(sorted(table.groupby("keep"), reverse=True)):
        colour = PALETTE[i % len(PALETTE)]
        left.scatter(part["bound"], part["hausdorff"], s=9, color=colour, alpha=0.7, label=f"keep {keep}", linewidths=0)
        right.scatter(part["hausdorff"], part["moved"], s=9, color=colour, alpha=0.7, linewidths=0)
    top = float(max(table["bound"].max(), table["hausdorff"].max())) * 1.05
    left.plot([0, top], [0, top], color=CHANCE, linewidth=1)
    left.set_xlim(0, top)
    left.set_ylim(0, top)
    left.set_xlabel("bound √(2(1 − ε))·B")
    left.set_ylabel("Hausdorff distance")
    left.set_title("Lemma: below the line it holds")
    right.set_xlabel("Hausdorff distance")
    right.set_ylabel("movement of the last token's state")
    right.set_title(f"Theorem: what the output does (r = {facts['correlation']:+.2f})")
    right.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle("DART's error bound on real states", x=0.02, ha="left", y=0.97)
    violated = sum(row["violated"] for row in facts["budgets"]) / len(facts["budgets"])
    equal = sum(row["equal_norms"] for row in facts["budgets"]) / len(facts["budgets"])
    figure.text(
        0.02, 0.02,
        f"{facts['model']} on {facts['data']}: {facts['n']} questions on {facts['images']} pictures, cut before "
        f"decoder layer {facts['layer']}; states as DART compares them.\nε: the largest of the pivots'; B: the "
        f"largest norm. The Lemma assumes equal norms, met on {100 * equal:.0f} % of questions; the bound is violated "
        f"on {100 * violated:.1f} %.\nMovement: length of the change of the last token's final state over its length.",
        fontsize=7.5, va="bottom",
    )  # fmt: skip
    return figure


FIGURE = FigureSpec(
    name="error-bound",
    summary="DART's Lemma and Theorem on real states: bound, measured distance, movement of the output",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
)
