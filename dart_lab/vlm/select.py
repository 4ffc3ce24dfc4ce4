"""`select`: what several methods would keep, from one run of the layers before their stage and nothing after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals
from dart_lab.vlm.front import FrontDropper
from dart_lab.vlm.insert import active, adapter_for, check_method, record, split_parts
from dart_lab.vlm.locate import model_of
from dart_lab.vlm.run import Run, Sample


class _Enough(Exception):
    """Every method has been asked; the remaining layers need not run."""


def select(
    model: Any, inputs: Mapping[str, Any], pruners: Sequence[Pruner], *, visual: Tensor | None = None
) -> list[Run]:
    """Which tokens each method would keep, each of them on the unpruned sequence.

    The picture is encoded once and the layers below the deepest stage run once; nothing after that runs, no token is
    generated.

    Args:
        model: a supported Hugging Face model object, or a `VLM`.
        inputs: what the processor returned.
        pruners: the methods; their layers may differ.
        visual: as in `prune`.

    Returns:
        One `Run` a pruner, in the same order.

    Raises:
        DartLabError: no pruners, no visual tokens in the inputs, or as `prune`.
    """
    if not pruners:
        raise DartLabError("select needs at least one pruner, for example DART(keep=64)")
    for pruner in pruners:
        check_method(pruner)
    model = model_of(model)
    runs = [Run() for _ in pruners]
    several = [pruner.name for pruner in pruners if len(pruner.parts()) != 1]
    if several:
        raise DartLabError(
            f"{several[0]} decides in several stages, each on what the one before left; run it with prune()"
        )
    parts = [pruner.parts()[0] for pruner in pruners]
    layers, front = split_parts(model, parts)
    if layers["cache"]:
        raise DartLabError(f"{layers['cache'][0].name} acts on the KV cache after the last layer; run it with prune()")
    last = max(layers["stages"], default=0)

    def note(part: Pruner, reduction: Reduction, samples: list[Sample], number: Tensor) -> None:
        for run, pruner, own in zip(runs, pruners, parts, strict=True):
            if own is part:
                copies = [Sample(sample.tokens, sample.token_ids, sample.images, sample.view) for sample in samples]
                record(run, pruner, reduction, copies, number, stage=part.stage)

    def decide(layer: int, signals: Signals, samples: list[Sample], number: Tensor) -> None:
        for part in parts:
            if part.stage.kind == "LLM_LAYER" and part.stage.layer == layer:
                note(part, part(signals), samples, number)
        if layer == last:
            raise _Enough

    def front_done() -> None:
        if not last:
            raise _Enough

    watcher = FrontDropper(
        model,
        adapter_for(model, visual),
        visual,
        decide=decide,
        front=front,
        note=note,
        apply=False,
        before_layers=front_done,
        **layers,
    )
    with active(model, watcher), torch.no_grad():
        try:
            model(**{**inputs, "use_cache": False})
        except _Enough:
            return runs
    raise DartLabError("there is nothing to select: the inputs have no visual tokens (a text-only prompt?)")
