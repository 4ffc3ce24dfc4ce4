"""`dart-lab figure kept-overlay`: which visual tokens each method keeps, over the pictures themselves."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.displays.overlay import overlay_pixels
from dart_lab.errors import DartLabError
from dart_lab.pruners.registry import make_pruner

from .sweep import DATA

METHODS = ("dart", "fastv", "divprune", "random")
KEEP = (64,)
SAMPLES = 3
MOST_SAMPLES = 12  # more pictures than this are no figure any more
_SHOWN_SIDE = 336  # pixels of the longer side of a picture kept in the facts
_CELL, _LEFT, _TOP, _BOTTOM = 1.9, 0.3, 0.95, 0.45  # inches


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Ask every method about the first pictures of the data.

    Args:
        options: `methods` default to dart, fastv, divprune and random, `keep` to 64, `n` to 3 pictures.
        progress: not used, it takes seconds.

    Raises:
        DartLabError: an unknown method, model or task; several budgets; more pictures than can be shown.
    """
    from dart_lab.tasks import load_task
    from dart_lab.vlm.load import check_model_name, load
    from dart_lab.vlm.locate import layout
    from dart_lab.vlm.select import select

    o = dataclasses.replace(
        options, n=options.n or SAMPLES, keep=options.keep or KEEP, data=options.data or DATA,
        methods=options.methods or METHODS,
    )  # fmt: skip
    methods, keeps, n = o.methods or (), o.keep or (), o.n or SAMPLES
    if len(keeps) != 1 or n > MOST_SAMPLES:
        raise DartLabError(
            f"kept-overlay shows one budget on at most {MOST_SAMPLES} pictures; got {list(keeps)}, n={n}"
        )
    check_model_name(o.model)
    pruners = {name: make_pruner(name, keep=keeps[0], layer=o.layer, seed=o.seed) for name in methods}
    task = load_task(o.data or DATA, n=n, seed=o.seed)
    vlm = load(o.model)
    tables, pictures = [], []
    for number, sample in enumerate(task):
        inputs = vlm.prepare([sample.image], [sample.question])
        tokens = layout(vlm, inputs, images=[sample.image]).samples[0]
        scale = min(1.0, _SHOWN_SIDE / max(sample.image.size))
        pictures.append(
            {
                "png": _png(sample.image, scale), "question": sample.question,
                "box": [None if np.isnan(box).any() else (box * scale).round(2).tolist() for box in tokens.box],
            }
        )  # fmt: skip
        for name, run in zip(pruners, select(vlm, inputs, list(pruners.values())), strict=True):
            rows = run.table().drop(columns=["order", "token"])
            tables.append(rows.assign(method=name, sample=number, image_id=sample.image_id or sample.id))
    facts = {
        "command": f"dart-lab figure kept-overlay --model {o.model} --data {o.data} --methods {','.join(methods)} "
        f"--keep {keeps[0]} --layer {o.layer} --n {n} --seed {o.seed}",
        "model": o.model, "data": task.name, "methods": list(methods), "keep": str(keeps[0]), "layer": o.layer,
        "pictures": pictures, "task": task.provenance(), "provenance": vlm.provenance(),
    }  # fmt: skip
    return FigureData(pd.concat(tables, ignore_index=True), facts)


def _png(picture: Image.Image, scale: float) -> str:
    """A picture, shrunk, as the text of a PNG."""
    small = picture.convert("RGB").resize([max(1, round(side * scale)) for side in picture.size])
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """A row a picture, a column a method: kept cells bright."""
    pictures, methods = facts["pictures"], facts["methods"]
    width, height = _LEFT + _CELL * len(methods) + 0.1, _TOP + _CELL * len(pictures) + _BOTTOM
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(len(pictures), len(methods), squeeze=False)
    figure.subplots_adjust(
        left=_LEFT / width, right=1 - 0.1 / width, top=1 - _TOP / height, bottom=_BOTTOM / height, wspace=0.06,
        hspace=0.06,
    )  # fmt: skip
    for i, shown in enumerate(pictures):
        image = Image.open(io.BytesIO(base64.b64decode(shown["png"]))).convert("RGB")
        box = np.array([[np.nan] * 4 if one is None else one for one in shown["box"]])
        for j, method in enumerate(methods):
            own = table[(table["sample"] == i) & (table["method"] == method)]
            tokens = SimpleNamespace(image=own["image"].to_numpy(), box=box)
            kept = np.flatnonzero(own["kept"].to_numpy())
            axes = grid[i, j]
            axes.imshow(overlay_pixels(image, tokens, kept), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if i == 0:
                axes.set_title(method)
            if j == 0:
                axes.set_ylabel(f"picture {i + 1}", fontsize=8)
    title = f"Visual tokens that stay: {facts['keep']} of {len(pictures[0]['box'])}"
    figure.suptitle(title, x=0.02, ha="left", y=1 - 0.15 / height, fontsize=11)
    where = f"{facts['model']} on {facts['data']}; single-cut methods before decoder layer {facts['layer']}."
    figure.text(0.02, 0.12 / height, where, fontsize=7.5)
    return figure


def lines(facts: Mapping[str, Any]) -> list[str]:
    """The questions."""
    return [f"picture {number}: {shown['question']}" for number, shown in enumerate(facts["pictures"], start=1)]


FIGURE = FigureSpec(
    name="kept-overlay",
    summary="which visual tokens each method keeps, over the pictures",
    compute=compute,
    draw=draw,
    lines=lines,
)
