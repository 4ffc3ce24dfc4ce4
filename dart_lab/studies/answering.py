"""Answers of a model under several conditions, as records: one row a sample and condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dart_lab.pruners.base import Pruner
from dart_lab.studies.branch import Branch, branch
from dart_lab.tasks.base import Sample
from dart_lab.tasks.scoring import is_right


def answer_all(
    vlm: Any,
    samples: Sequence[Sample],
    conditions: Mapping[str, Pruner | None],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 16,
    share: bool = True,
    memory: int | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Ask every question under every condition, greedily.

    Args:
        vlm: the loaded model.
        samples: with `id`, `image`, `question`, `answer`, `family` and `image_id`.
        conditions: name → method; None: nothing is pruned.
        batch_size: samples in one pass.
        max_new_tokens: length at which an answer is cut.
        share, memory: as in `branch`.
        progress: show a progress bar on stderr.

    Returns:
        Columns `condition`, `sample`, `image_id`, `family`, `question`, `prediction`, `answer`, `correct` (0 or 1),
        `visual`, `asked` (-1: a threshold decides), `got`, and `processed` and `output`: visual tokens averaged over
        the decoder layers by either convention of `dart_lab.pruners.cost.Cost.average`.

    Raises:
        DartLabError: as `prune`; the message names the condition.
    """
    from tqdm import tqdm

    rows: list[dict[str, Any]] = []
    starts = range(0, len(samples), batch_size)
    for start in tqdm(starts, desc="questions", unit="batch", disable=not progress):
        batch = samples[start : start + batch_size]
        inputs = vlm.prepare([sample.image for sample in batch], [sample.question for sample in batch])
        found = branch(
            vlm, inputs, list(conditions.values()), max_new_tokens=max_new_tokens, share=share, memory=memory
        )
        for name, one in zip(conditions, found, strict=True):
            texts = vlm.words(one.tokens)
            rows += [
                record_of(sample, name, text, one, number, vlm.depth)
                for number, (sample, text) in enumerate(zip(batch, texts, strict=True))
            ]
    return pd.DataFrame(rows)


def record_of(sample: Sample, condition: str, text: str, one: Branch, number: int, depth: int) -> dict[str, Any]:
    """The record of one answer: `text` is what sample `number` of the batch answered in branch `one`."""
    seen = one.run.samples[number]
    layers = seen.layer_counts(depth)
    return {
        "condition": condition,
        "sample": sample.id,
        "image_id": sample.image_id or sample.id,
        "family": sample.family,
        "question": sample.question,
        "prediction": text,
        "answer": sample.answer,
        "correct": float(is_right(text, sample.answer)),
        "visual": len(seen.tokens),
        "asked": one.run.asked[number],
        "got": one.run.got[number],
        "processed": sum(layers) / depth,
        "output": sum([*layers[1:], layers[-1]]) / depth,
    }
