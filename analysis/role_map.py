"""`dart-lab figure role-map`: a pool of visual tokens in the plane, coloured by role, under two rules side by side."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.curves import wrapped
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.displays.roles import ROLE_COLOURS, draw_scatter
from dart_lab.roles.labels import DEAD, LLM_SINK, ROLES, VIT_SINK, agreement
from dart_lab.roles.rule import VOCABULARY
from dart_lab.roles.rules import DEFAULT, Definition, check_definition

from .role_bench import open_roles

SAMPLES = 60
TOKENS = 2400  # points in the plane, drawn evenly from all pictures
RULES: Mapping[str, Definition] = {
    "thresholds": DEFAULT,  # or those of --rules
    "nearest centroid": {VIT_SINK: "centroid", LLM_SINK: "centroid", DEAD: "centroid"},
}
PERPLEXITY, NEIGHBOURS = 30, 15


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Draw tokens from the pictures, label them by two rules, and lay them out by t-SNE and UMAP.

    Args:
        options: `n` defaults to 60 pictures; `methods`, `keep` and `layer` are not used.
        progress: show progress bars on stderr.
    """
    from tqdm import tqdm

    found = open_roles(options, n=SAMPLES, progress=progress)
    bench, book = found.bench, found.book
    definitions = {**RULES, "thresholds": {**DEFAULT, **(bench.options.rules or {})}}
    rules = [rule for own in definitions.values() for rule in check_definition(own).values()]
    book = book.with_table(bench.vlm) if any(VOCABULARY in rule.needs for rule in rules) else book
    rng = np.random.Generator(np.random.PCG64(bench.options.seed))
    each = max(TOKENS // len(bench.task), 1)
    vectors, parts = [], []
    for sample in tqdm(bench.task, desc="pictures", disable=not progress):
        inputs = bench.vlm.prepare([sample.image], [sample.question])
        states = book.states(bench.vlm, inputs, rules)[0]
        chosen = np.sort(rng.permutation(len(states.embeds))[:each])
        labels = {rule: book.roles_of(states, definition=own).primary[chosen] for rule, own in definitions.items()}
        vectors.append(states.embeds[chosen].float().cpu().numpy())
        parts.append(
            pd.DataFrame(
                {"image_id": sample.image_id or sample.id, "row": states.tokens.row[chosen],
                 "column": states.tokens.column[chosen],
                 **{rule: np.array(ROLES)[label] for rule, label in labels.items()}}
            )
        )  # fmt: skip
    unit = np.concatenate(vectors)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    table = pd.concat(parts, ignore_index=True)
    for name, plane in planes(unit, bench.options.seed).items():
        table[f"{name} x"], table[f"{name} y"] = plane[:, 0], plane[:, 1]
    labels = {rule: table[rule].map(ROLES.index).to_numpy() for rule in RULES}
    agreed = agreement(labels).iloc[0]
    kappa = None if np.isnan(agreed["kappa"]) else float(agreed["kappa"])
    facts = {
        **found.facts("role-map"), "images": int(table["image_id"].nunique()), "tokens": len(table), "kappa": kappa,
        "ari": float(agreed["ari"]),
        "shares": {rule: {role: float((table[rule] == role).mean()) for role in ROLES} for rule in RULES},
    }  # fmt: skip
    return FigureData(table, facts)


def planes(unit: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """t-SNE and UMAP of unit vectors `(n, channels)`, `(n, 2)` each; same seed, same plane."""
    from sklearn.manifold import TSNE
    from umap import UMAP

    perplexity, neighbours = min(PERPLEXITY, (len(unit) - 1) / 3), min(NEIGHBOURS, len(unit) - 1)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(unit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads, which a seed excludes
        umap = UMAP(n_neighbors=neighbours, metric="cosine", random_state=seed, n_jobs=1).fit_transform(unit)
    return {"t-SNE": np.asarray(tsne, np.float32), "UMAP": np.asarray(umap, np.float32)}


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Shares by both rules, and how far they agree."""
    out = list(facts["book"])
    for rule, shares in facts["shares"].items():
        out.append(f"{rule}: " + ", ".join(f"{role} {100 * share:.1f} %" for role, share in shares.items() if share))
    kappa = "not defined, there is one role" if facts["kappa"] is None else f"{facts['kappa']:.2f}"
    return [*out, f"agreement of the rules: kappa {kappa}, adjusted Rand index {facts['ari']:.2f}"]


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Rows: t-SNE and UMAP; columns: the two rules."""
    width, height = 7.4, 7.9
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(2, len(RULES))
    figure.subplots_adjust(left=0.06, right=0.98, top=1 - 0.95 / height, bottom=0.85 / height, wspace=0.06, hspace=0.08)
    shown = [role for role in ROLES if any(facts["shares"][rule][role] for rule in RULES)]
    for i, plane in enumerate(("t-SNE", "UMAP")):
        for j, rule in enumerate(RULES):
            points = table[[f"{plane} x", f"{plane} y"]].to_numpy()
            draw_scatter(grid[i, j], points, table[rule].tolist(), shown)
            if i == 0:
                grid[i, j].set_title(f"by {rule}")
        grid[i, 0].set_ylabel(plane)
    handles = [figure.axes[0].scatter([], [], s=18, color=ROLE_COLOURS[role]) for role in shown]
    figure.legend(handles, shown, loc="upper left", bbox_to_anchor=(0.03, 1 - 0.38 / height), ncols=4, frameon=False)
    figure.suptitle("Roles of visual tokens at the input of the language model", x=0.02, ha="left", y=1 - 0.15 / height)
    kappa = "" if facts["kappa"] is None else f" Agreement of the two rules: κ = {facts['kappa']:.2f}."
    text = (
        f"{facts['model']} on {facts['data']}: {facts['tokens']} tokens of {facts['images']} pictures, cosine "
        f"distance. Distances between far clusters, and their sizes, mean nothing in these planes.{kappa}"
    )
    figure.text(0.02, 0.1 / height, wrapped(text, 125), fontsize=7.5, va="bottom")
    return figure


FIGURE = FigureSpec(
    name="role-map",
    summary="visual tokens in the plane (t-SNE, UMAP), coloured by role, under two rules",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
    roles=True,
)
