"""`dart-lab figure role-positions`: in which rows each role lies, and on what kind of patches: confounds of roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.curves import wrapped
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.displays.roles import ROLE_COLOURS
from dart_lab.roles.labels import ROLES

from .role_bench import open_roles

SAMPLES = 70


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Roles, rows and patch contrast of every visual token of the pictures.

    Args:
        options: `n` defaults to 70 pictures; `methods`, `keep` and `layer` are not used.
        progress: show progress bars on stderr.
    """
    from tqdm import tqdm

    from dart_lab.vlm.locate import layout

    found = open_roles(options, n=SAMPLES, progress=progress)
    bench, parts = found.bench, []
    for sample in tqdm(bench.task, desc="pictures", disable=not progress):
        inputs = bench.vlm.prepare([sample.image], [sample.question])
        tokens = layout(bench.vlm, inputs, images=[sample.image]).samples[0]
        roles = found.roles(inputs)[0]
        parts.append(
            pd.DataFrame(
                {
                    "sample": sample.id, "image_id": sample.image_id or sample.id, "row": tokens.row,
                    "column": tokens.column, "role": np.array(ROLES)[roles.primary],
                    "contrast": contrast(np.asarray(sample.image.convert("L"), dtype=np.float32), tokens.box),
                }
            )
        )  # fmt: skip
    table = pd.concat(parts, ignore_index=True)
    return FigureData(table, {**found.facts("role-positions"), **measure(table, seed=bench.options.seed)})


def contrast(grey: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Standard deviation of the grey values (0 to 255) in every box; NaN for a token without a place.

    >>> contrast(np.array([[0.0, 0.0], [0.0, 2.0]]), np.array([[0, 0, 2, 1], [0, 0, 2, 2], [np.nan] * 4])).round(3)
    array([0.   , 0.866,   nan])
    """
    out = np.full(len(boxes), np.nan)
    for number, box in enumerate(boxes):
        if np.isfinite(box).all():
            x0, y0, x1, y1 = np.floor(box[:2]).astype(int).tolist() + np.ceil(box[2:]).astype(int).tolist()
            part = grey[max(y0, 0) : max(y1, 1), max(x0, 0) : max(x1, 1)]
            out[number] = part.std() if part.size else np.nan
    return out


def measure(table: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """Share of each row's tokens that have a role, with intervals over pictures, and the contrast under each role.

    Args:
        table: one row a token: `image_id`, `row`, `role`, `contrast`.
        seed: of the bootstrap.
        n_boot: resamples of pictures. Default 1000.

    Returns:
        `rows`: the rows; `by_row`: role → value, low, high for each row; `contrast`: role → median, and the share of
        its patches flatter than half of all.
    """
    table = table[table["row"] >= 0]
    rows = np.sort(table["row"].unique())
    images = table["image_id"].unique()
    counts = np.zeros((len(images), len(ROLES), len(rows)))
    place = {image: i for i, image in enumerate(images)}
    index = [table["image_id"].map(place), table["role"].map(ROLES.index), np.searchsorted(rows, table["row"])]
    np.add.at(counts, tuple(np.asarray(i) for i in index), 1)
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = rng.multinomial(len(images), np.full(len(images), 1 / len(images)), size=n_boot)
    drawn = np.einsum("bi,irk->brk", weights, counts)
    drawn /= drawn.sum(axis=1, keepdims=True)
    value = counts.sum(axis=0) / counts.sum(axis=(0, 1))
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    flat = table["contrast"].median()
    return {
        "rows": rows.tolist(),
        "by_row": {
            role: {"value": value[i].tolist(), "low": low[i].tolist(), "high": high[i].tolist()}
            for i, role in enumerate(ROLES)
        },
        "contrast": {
            str(role): {"median": float(part.median()), "flatter": float((part < flat).mean())}
            for role, part in table.groupby("role", sort=False)["contrast"]
        },
        "images": len(images),
    }


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Where each role lies and what it lies on."""
    out = list(facts["book"])
    for role in facts["roles"]:
        value, found = facts["by_row"][role]["value"], facts["contrast"].get(role)
        if found is None:
            continue
        out.append(
            f"{role}: {100 * value[0]:.0f} % of the top row, {100 * value[len(value) // 2]:.0f} % of the middle, "
            f"{100 * value[-1]:.0f} % of the bottom row; median contrast {found['median']:.1f} (sd of grey), "
            f"{found['flatter']:.0%} of its patches are flatter than the median patch"
        )
    return out


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Share of each role by row, and the contrast of the patches under each role."""
    width, height = 8.2, 4.4
    figure = Figure(figsize=(width, height))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.08, right=0.98, top=1 - 0.85 / height, bottom=1.25 / height, wspace=0.28)
    for role in facts["roles"]:
        curve = {end: 100 * np.array(facts["by_row"][role][end]) for end in ("value", "low", "high")}
        left.fill_between(facts["rows"], curve["low"], curve["high"], color=ROLE_COLOURS[role], alpha=0.2, linewidth=0)
        left.plot(facts["rows"], curve["value"], color=ROLE_COLOURS[role], marker="o", markersize=3, label=role)
        own = table[(table["role"] == role) & table["contrast"].notna()]["contrast"]
        if len(own):
            order = np.sort(own.to_numpy())
            right.plot(order, 100 * np.arange(1, len(order) + 1) / len(order), color=ROLE_COLOURS[role], label=role)
    left.set_xlabel("row of the picture, top to bottom")
    left.set_ylabel("share of the row's tokens (%)")
    left.set_ylim(0, 100)
    left.legend(frameon=False)
    right.set_xlabel("contrast of the patch (sd of grey, 0 to 127)")
    right.set_ylabel("tokens at or below (%)")
    right.set_ylim(0, 100)
    figure.suptitle("Where roles lie, and on what", x=0.02, ha="left", y=1 - 0.15 / height)
    text = (
        f"{facts['model']} on {facts['data']}: every visual token of {facts['images']} pictures; bands: 95 %, "
        "bootstrap over pictures. A role that lies in certain rows, or on flat patches, is confounded with place and "
        "content."
    )
    figure.text(0.02, 0.1 / height, wrapped(text, 140), fontsize=7.5, va="bottom")
    return figure


FIGURE = FigureSpec(
    name="role-positions",
    summary="in which rows each role of visual tokens lies, and on what kind of patches",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
    roles=True,
)
