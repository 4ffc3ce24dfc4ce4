"""Answers of a model under several conditions, as records: one row a sample and condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pandas as pd

from dart_lab.pruners.base import Pruner
from dart_lab.tasks.base import Sample
from dart_lab.tasks.scoring import is_right


def answer_all(
    vlm: Any,
    samples: Sequence[Sample],
    conditions: Mapping[str, Pruner | None],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 16,
    progress: bool = False,
) -> pd.DataFrame:
    """Ask every question under every condition, greedily.

    Args:
        vlm: the loaded model.
        samples: with `id`, `image`, `question`, `answer`, `family` and `image_id`.
        conditions: name → method; None: nothing is pruned.
        batch_size: samples in one pass.
        max_new_tokens: length at which an answer is cut.
        progress: show a progress bar on stderr.

    Returns:
        Columns `condition`, `sample`, `image_id`, `family`, `prediction`, `answer`, `correct` (0 or 1), `visual`,
        `asked` (-1: a threshold decides), `got`, `processed` and `output`: visual tokens averaged over the decoder
        layers by either convention of `dart_lab.pruners.cost.Cost.average`.

    Raises:
        DartLabError: as `prune`; the message names the condition.
    """
    from tqdm import tqdm

    rows = []
    starts = range(0, len(samples), batch_size)
    for start in tqdm(starts, desc="questions", unit="batch", disable=not progress):
        batch = samples[start : start + batch_size]
        inputs = vlm.prepare([sample.image for sample in batch], [sample.question for sample in batch])
        for name, pruner in conditions.items():
            rows += _rows(vlm, batch, inputs, name, pruner, max_new_tokens)
    return pd.DataFrame(rows)


def _rows(
    vlm: Any, batch: Sequence[Sample], inputs: Any, name: str, pruner: Pruner | None, max_new_tokens: int
) -> list[dict[str, Any]]:
    from dart_lab.vlm.insert import prune
    from dart_lab.vlm.locate import layout

    depth = vlm.depth
    counts = [len(tokens) for tokens in layout(vlm, inputs).samples]
    with nullcontext() if pruner is None else prune(vlm, pruner) as run:
        given = vlm.answers(inputs, max_new_tokens=max_new_tokens)
    out = []
    for number, (sample, text) in enumerate(zip(batch, given, strict=True)):
        own = None if run is None else run.samples[number]
        visual = counts[number]
        layers = [visual] * depth if own is None else own.layer_counts(depth)
        out.append(
            {
                "condition": name,
                "sample": sample.id,
                "image_id": sample.image_id or sample.id,
                "family": sample.family,
                "prediction": text,
                "answer": sample.answer,
                "correct": float(is_right(text, sample.answer)),
                "visual": visual,
                "asked": visual if run is None else run.asked[number],
                "got": visual if run is None else run.got[number],
                "processed": sum(layers) / depth,
                "output": sum([*layers[1:], layers[-1]]) / depth,
            }
        )
    return out
