"""`dart-lab figure attention-mass`: attention that each role gets, layer by layer, whole and per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.curves import wrapped
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.displays.roles import ROLE_COLOURS
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.protect import Protect
from dart_lab.pruners.remove import Remove
from dart_lab.roles.labels import ALIVE, DEAD, ROLES, as_groups

from .role_bench import before_layer, masks, open_roles

SAMPLES = 40
HALF = 2
QUERY = "last"
ORIGINAL, PRUNED = "original", "divprune"
TEXT = "text and <bos>"
LEVEL = 0.95
PUBLISHED = (
    "Papers differ: EmbedLens (2603.00510) says dead tokens get under 8 % of the cross-modal attention, 2608.04483 "
    "that they get about as much as alive ones; both on LLaVA-1.5-7B, with other query sets."
)


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Record the mass of the last prompt token on every role: whole, without a role, pruned, pruned and protected.

    Args:
        options: `methods`: the pruner, by default divprune; `keep` half of the visual tokens; `n` 40 questions.
        progress: show progress bars on stderr.
    """
    from tqdm import tqdm

    import dart_lab as dl

    found = open_roles(options, n=SAMPLES, methods=(PRUNED,), progress=progress)
    o, bench = found.bench.options, found.bench
    keep = int((o.keep or (bench.depth.visual // HALF,))[0])
    method = (o.methods or (PRUNED,))[0]
    plain = before_layer(method, keep=keep, depth=bench.depth, layer=o.layer, seed=o.seed)
    parts = []
    for start in tqdm(range(0, len(bench.task), o.batch_size), desc="questions", unit="batch", disable=not progress):
        batch = bench.task[start : start + o.batch_size]
        inputs = bench.vlm.prepare([s.image for s in batch], [s.question for s in batch])
        roles = found.roles(inputs)
        arms: dict[str, Pruner | None] = {ORIGINAL: None}
        for role in (ALIVE, DEAD):
            if role in found.present and len(found.present) > 1:
                arms[f"without {role}"] = Remove(mask=masks([own[role] for own in roles]), layer=o.layer)
        arms[method] = plain
        if DEAD in found.present and len(found.present) > 1:
            arms[f"{method} + {DEAD} protected"] = Protect(plain, mask=masks([own[DEAD] for own in roles]))
        for name, pruner in arms.items():
            with dl.record(bench.vlm, dl.AttentionMass(groups=as_groups(roles))) as trace:
                _run(bench.vlm, inputs, pruner)
            rows = trace.table().query("query == @QUERY and step == 0")
            ids = np.array([s.image_id or s.id for s in batch])
            parts.append(rows.assign(arm=name, image_id=ids[rows["row"].to_numpy()], sample=rows["sample"] + start))
    table = pd.concat(parts, ignore_index=True).drop(columns=["row", "step", "query"])
    facts = {**found.facts("attention-mass"), "method": method, "kept": keep}
    return FigureData(table, {**facts, **measure(table, seed=o.seed)})


def _run(vlm: Any, inputs: Any, pruner: Pruner | None) -> None:
    import torch

    import dart_lab as dl

    with torch.inference_mode():
        if pruner is None:
            vlm.model(**inputs, logits_to_keep=1)
            return
        with dl.prune(vlm, pruner):
            vlm.model(**inputs, logits_to_keep=1)


def measure(table: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """Mean mass and pairwise score of every role, layer and arm, with intervals over pictures.

    Args:
        table: one row an arm, sample, layer and key: `mass`, `pairwise`, `keys`, `image_id`.
        seed: of the bootstrap.
        n_boot: resamples of pictures. Default 1000.

    Returns:
        `layers`; `mass` and `pairwise`: arm → role → value, low, high for each layer (null where no picture has a token
        of it there); `text`: arm → mass on text and `<bos>`; `tokens`: arm → role → tokens at the deepest layer.
    """
    layers = sorted(int(layer) for layer in table["layer"].unique())
    rng = np.random.Generator(np.random.PCG64(seed))
    images = table["image_id"].unique()
    weights = rng.multinomial(len(images), np.full(len(images), 1 / len(images)), size=n_boot).astype(float)
    mass: dict[str, Any] = {}
    pairwise: dict[str, Any] = {}
    text: dict[str, Any] = {}
    tokens: dict[str, Any] = {}
    for arm in dict.fromkeys(table["arm"]):
        part = table[table["arm"] == arm]
        mass[arm], pairwise[arm] = {}, {}
        for role in ROLES:
            own = part[part["key"] == role]
            for out, column in ((mass, "mass"), (pairwise, "pairwise")):
                out[arm][role] = _curve(own, column, images, layers, weights)
        rest = part[~part["key"].isin(ROLES)].groupby(["layer", "sample"])["mass"].sum().groupby("layer").mean()
        text[arm] = [float(rest.loc[layer]) for layer in layers]
        deep = part[part["layer"] == layers[-1]]
        tokens[arm] = {role: float(deep[deep["key"] == role]["keys"].mean()) for role in ROLES}
    return {"layers": layers, "mass": mass, "pairwise": pairwise, "text": text, "tokens": tokens, "images": len(images)}


def _curve(
    own: pd.DataFrame, column: str, images: np.ndarray, layers: Sequence[int], weights: np.ndarray
) -> dict[str, list[float | None]]:
    """Means over pictures in which the role is there, and their bootstrap interval."""
    wide = own.pivot_table(index="image_id", columns="layer", values=column, aggfunc="mean")
    values = wide.reindex(index=images, columns=np.array(layers)).to_numpy(float)
    there = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = (weights @ np.where(there, values, 0.0)) / (weights @ there)
        mean = np.where(there, values, 0.0).sum(axis=0) / there.sum(axis=0)
    out: dict[str, list[float | None]] = {"value": [], "low": [], "high": []}
    for i in range(len(layers)):
        column_ = drawn[:, i][np.isfinite(drawn[:, i])]
        ends = np.quantile(column_, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(column_) else (np.nan, np.nan)
        for name, value in zip(out, (mean[i], *ends), strict=True):
            out[name].append(float(value) if np.isfinite(value) else None)
    return out


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Mean mass over the layers of every arm and role."""
    out = list(facts["book"])
    for arm, roles in facts["mass"].items():
        words = []
        for role in facts["roles"]:
            found = [value for value in roles[role]["value"] if value is not None]
            if found:
                left = facts["tokens"][arm][role]
                words.append(f"{role} {100 * np.mean(found):.1f} % ({left:.0f} tokens in the last layer)")
        out.append(f"{arm}: " + ", ".join(words) + f", {TEXT} {100 * np.mean(facts['text'][arm]):.1f} %")
    return [*out, PUBLISHED]


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """A column an arm; rows: mass of the group, and of one token of it."""
    arms = list(facts["mass"])
    width, height = 1.0 + 2.15 * len(arms), 6.1
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(2, len(arms), sharex=True, sharey="row", squeeze=False)
    figure.subplots_adjust(
        left=0.75 / width, right=0.985, top=1 - 0.95 / height, bottom=1.2 / height, wspace=0.1, hspace=0.12
    )
    for j, arm in enumerate(arms):
        for i, kind in enumerate(("mass", "pairwise")):
            for role in facts["roles"]:
                curve = facts[kind][arm][role]
                value, low, high = (100 * np.array(curve[end], dtype=float) for end in ("value", "low", "high"))
                colour = ROLE_COLOURS[role]
                grid[i, j].fill_between(facts["layers"], low, high, color=colour, alpha=0.2, linewidth=0)
                grid[i, j].plot(facts["layers"], value, color=colour, marker="o", markersize=2.5, label=role)
        grid[0, j].plot(facts["layers"], 100 * np.array(facts["text"][arm]), color="black", linestyle=":", label=TEXT)
        grid[0, j].set_title(arm.replace(" + ", " +\n"), fontsize=8.5)
        grid[1, j].set_xlabel("decoder layer")
        grid[1, j].set_yscale("log")
    grid[0, 0].set_ylabel("mass on the group (%)")
    grid[1, 0].set_ylabel("attention a token of it gets (%)")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=(0.012, 1 - 0.36 / height), ncols=5, frameon=False,
                  fontsize=8)  # fmt: skip
    figure.suptitle("Attention on roles of visual tokens", x=0.02, ha="left", y=1 - 0.12 / height)
    said = (
        f"{facts['model']} on {facts['data']}: {facts['n']} questions on {facts['images']} pictures. Query: the last "
        f"prompt token, mean over heads, not renormalised; bands: 95 %, bootstrap over pictures. {facts['method']} "
        f"keeps {facts['kept']} before decoder layer {facts['layer']}. {PUBLISHED}"
    )
    figure.text(0.02, 0.08 / height, wrapped(said, round(16.5 * width)), fontsize=7, va="bottom")
    return figure


FIGURE = FigureSpec(
    name="attention-mass",
    summary="attention that each role of visual tokens gets, layer by layer, whole and per token",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
    roles=True,
)
