"""Where kept visual tokens lie, and whether that is the place's doing or the picture's.

For each method and budget: how often each grid cell is kept, against what uniform keeping would give by chance, and
again with every picture turned upside down. A bias of position stays where it was on the canvas; a preference for
content moves with the content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.errors import DartLabError

from .kept_maps import KeptMaps, Null, content_shift, describe, kept_maps, uniform_null

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from dart_lab.pruners.base import Pruner
    from dart_lab.tasks import Sample

METHODS = ("dart", "fastv", "random", "uniform-grid")
KEEP = (64, 128, 192)
SAMPLES = 200
DATA = "shapes"
AS_IS, FLIPPED = "none", "vertical"

#: What was published about other models, printed beside our numbers and never mixed with them.
PUBLISHED: tuple[dict[str, Any], ...] = (
    {
        "model": "Prismatic (SigLIP + Llama-2-7B), another model",
        "method": "fastv",
        "setting": "before layer 3, a quarter of the visual tokens kept",
        "mean_raster_index": 0.807,
        "source": "FEATHER, arXiv 2412.13180",
    },
    {
        "model": "LLaVA-1.5-7B, another model",
        "method": "fastv",
        "setting": "before layer 2, 8,910 questions of POPE",
        "statement": "late (bottom) tokens are kept more often than early ones",
        "source": "Wen et al., arXiv 2502.11501",
    },
)

_COLUMNS = ["sample", "image", "frame", "crop", "row", "column", "kept", "layer", "asked", "got"]


def compute(options: FigureOptions, progress: bool = False) -> FigureData:
    """Run the model's first layers over the data, ask every method at every budget, and measure.

    Args:
        options: see `FigureOptions`; defaults: the drawn world, 200 samples, methods dart, fastv, random and
            uniform-grid, 64, 128 and 192 tokens.
        progress: show a progress bar on stderr.

    Raises:
        DartLabError: an unknown method, model or task; a budget or layer that does not fit; fewer than two samples.
    """
    from dart_lab.tasks import load_task
    from dart_lab.vlm.load import check_model_name, load

    options = _with_defaults(options)
    pruners = _pruners(options)
    check_model_name(options.model)
    task = load_task(options.data or DATA, n=options.n, seed=options.seed)
    vlm = load(options.model)
    table = pd.concat(
        [
            collect(vlm, task, pruners, flip=AS_IS, batch_size=options.batch_size, progress=progress),
            # another seed: a method that draws must not meet its own draw again
            collect(
                vlm, task, {label: _reseeded(pruner) for label, pruner in pruners.items()}, flip=FLIPPED,
                batch_size=options.batch_size, progress=progress,
            ),
        ],
        ignore_index=True,
    )
    facts = {
        "command": _command(options),
        "model": options.model,
        "data": task.name,
        "seed": options.seed,
        "layer": options.layer,
        "task": task.provenance(),
        "provenance": vlm.provenance(),
        **measure(table, seed=options.seed),
        "published": list(PUBLISHED),
    }
    return FigureData(table, facts)


def collect(
    vlm: Any, samples: Sequence[Sample], pruners: Mapping[tuple[str, str], Pruner], *, flip: str, batch_size: int,
    progress: bool = False,
) -> pd.DataFrame:
    """Ask every method about every sample; one pass of the model's first layers serves them all.

    Args:
        vlm: the loaded model.
        samples: with `image`, `question` and `image_id`.
        pruners: (method, budget as given) → pruner.
        flip: "none" or "vertical", which way the pictures are turned.
        batch_size: samples in one pass.
        progress: show a progress bar on stderr.

    Returns:
        A trace with the columns `image_id`, `keep` and `flip` besides.
    """
    from tqdm import tqdm

    from dart_lab.vlm.select import select

    tables = []
    what = "pictures" if flip == AS_IS else "upside down"
    for start in tqdm(range(0, len(samples), batch_size), desc=what, unit="batch", disable=not progress):
        batch = samples[start : start + batch_size]
        inputs = vlm.prepare([_turned(sample.image, flip) for sample in batch], [sample.question for sample in batch])
        runs = select(vlm, inputs, list(pruners.values()))
        for (method, keep), run in zip(pruners, runs, strict=True):
            rows = _labelled(run.table(), pruners, method=method, keep=keep, flip=flip)
            rows["image_id"] = [batch[number].image_id or batch[number].id for number in rows["sample"]]
            tables.append(rows.assign(sample=rows["sample"] + start))
    return pd.concat(tables, ignore_index=True)


def measure(table: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000, n_null: int = 400) -> dict[str, Any]:
    """All numbers of the figure from its trace.

    Only the first picture's first crop counts (the whole picture, where a model cuts it up). Grids that differ from
    sample to sample are brought to one of relative coordinates (see `kept_maps`).

    Args:
        table: a trace with `method`, `keep`, `flip` and `image_id`.
        seed: of the bootstrap and of the uniform sampler.
        n_boot: bootstrap resamples. Default 1000.
        n_null: uniform samplers drawn for the band of chance. Default 400.

    Returns:
        `n`, `images`, `grid`, and `conditions`: one entry for each method and budget.

    Raises:
        DartLabError: fewer than two samples, or a map whose mean is not the retention ratio.
    """
    nulls: dict[tuple[Any, ...], Null] = {}
    conditions = []
    maps: KeptMaps | None = None
    for method, keep, part in _conditions(table):
        maps = kept_maps(part[part["flip"] == AS_IS])
        key = (*maps.grids, *maps.counts)
        if key not in nulls:
            nulls[key] = uniform_null(maps, draws=n_null, seed=seed)
        where = {"stage": str(part["stage"].iloc[0]), "layer": int(part["layer"].iloc[0])}
        entry = {"method": method, "keep": keep, **where, **describe(maps, nulls[key], n_boot=n_boot, seed=seed)}
        turned = part[part["flip"] == FLIPPED]
        if len(turned):
            entry["content_shift"] = content_shift(maps, kept_maps(turned), n_boot=n_boot, seed=seed)
        conditions.append(entry)
    if maps is None:
        raise DartLabError("the trace has no rows; run the figure with more samples")
    return {
        "n": len(maps.maps),
        "images": len(set(maps.image_ids)),
        "grid": list(maps.maps.shape[1:]),
        "flip": FLIPPED,
        "n_boot": n_boot,
        "n_null": n_null,
        "conditions": conditions,
    }


def lines(facts: Mapping[str, Any]) -> list[str]:
    """One line a method and budget, then what was published about other models."""
    out = []
    for c in facts["conditions"]:
        raster, bottom, kl, gini = (c[name] for name in ("mean_raster_index", "bottom_third", "kl", "gini"))
        out.append(
            f"{c['method']:<12} {c['got']:g} kept: raster index {_percent(raster)} (uniform 50), "
            f"bottom third {_percent(bottom)} (uniform 33.3), "
            f"KL {kl['value']:.3f} (uniform ≤ {kl['null_high']:.3f}), "
            f"Gini {gini['value']:.2f} (uniform ≤ {gini['null_high']:.2f}){_shift_words(c)}"
        )
    for p in facts.get("published", []):
        said = p.get("statement") or f"raster index {100 * p['mean_raster_index']:.1f} %"
        out.append(f"published ({p['model']}; not measured here): {p['method']} {p['setting']}: {said} [{p['source']}]")
    return out


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """The picture, from the facts alone."""
    from dart_lab.displays.position_bias import draw_position_bias

    return draw_position_bias(facts)


FIGURE = FigureSpec(
    name="position-bias",
    summary="how often each place of the picture is kept, by method and budget, and whether place or content decides",
    compute=compute,
    draw=draw,
    lines=lines,
)


def _with_defaults(options: FigureOptions) -> FigureOptions:
    options = dataclasses.replace(
        options,
        data=options.data or DATA,
        methods=options.methods or METHODS,
        keep=options.keep or KEEP,
        n=SAMPLES if options.n is None else options.n,
    )
    if options.n is None or options.n < 2:
        raise DartLabError(f"n={options.n}: at least 2 samples are needed for an interval; 200 is the default")
    if options.batch_size < 1:
        raise DartLabError(f"batch_size={options.batch_size}: at least 1 sample a pass")
    return options


def _pruners(options: FigureOptions) -> dict[tuple[str, str], Pruner]:
    from dart_lab.pruners.registry import make_pruner

    return {
        (method, str(keep)): make_pruner(method, keep=keep, layer=options.layer, seed=options.seed)
        for method in options.methods or ()
        for keep in options.keep or ()
    }


def _reseeded(pruner: Pruner) -> Pruner:
    return dataclasses.replace(pruner, seed=pruner.seed + 1)


def _turned(image: Image, flip: str) -> Image:
    from PIL import ImageOps

    turn: Callable[[Image], Image] = {AS_IS: lambda picture: picture, FLIPPED: ImageOps.flip}[flip]
    return turn(image)


def _labelled(
    table: pd.DataFrame, pruners: Mapping[tuple[str, str], Pruner], *, method: str, keep: str, flip: str
) -> pd.DataFrame:
    """A run's rows as rows of the figure's trace; labels are categories, which join without growing."""
    out = table[_COLUMNS].astype({name: "int32" for name in _COLUMNS if name != "kept"})
    labels = {
        "method": (method, list(dict.fromkeys(name for name, _ in pruners))),
        "keep": (keep, list(dict.fromkeys(budget for _, budget in pruners))),
        "flip": (flip, [AS_IS, FLIPPED]),
        "stage": (str(table["stage"].iloc[0]), [str(table["stage"].iloc[0])]),
    }
    for name, (value, categories) in labels.items():
        out[name] = pd.Categorical([value], categories=categories).repeat(len(out))
    return out


def _conditions(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Method, budget and rows of each condition, in the order of the labels."""
    for (method, keep), part in table.groupby(["method", "keep"], observed=True, sort=True):
        yield str(method), str(keep), part


def _command(options: FigureOptions) -> str:
    """The command that makes this figure again (without the folder it was written to)."""
    return (
        f"dart-lab figure position-bias --model {options.model} --data {options.data} "
        f"--methods {','.join(options.methods or ())} --keep {','.join(map(str, options.keep or ()))} "
        f"--layer {options.layer} --n {options.n} --seed {options.seed}"
    )


def _percent(stat: Mapping[str, float]) -> str:
    return f"{100 * stat['value']:.1f} % [{100 * stat['low']:.1f}, {100 * stat['high']:.1f}]"


def _shift_words(condition: Mapping[str, Any]) -> str:
    shift = condition.get("content_shift")
    if shift is None:
        return ""
    maps, pictures = shift["maps"], shift["pictures"]
    return (
        f", upside down: same place {maps['canvas']['value']:+.2f}, same content {maps['content']['value']:+.2f} "
        f"(each picture {pictures['canvas']['value']:+.2f}, {pictures['content']['value']:+.2f})"
    )
