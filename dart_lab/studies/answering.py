"""Answers of a model under several conditions, as records: one row a sample and condition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
            rows += _rows(batch, name, one, vlm.words(one.tokens), vlm.depth)
    return pd.DataFrame(rows)


def _rows(batch: Sequence[Sample], name: str, one: Branch, texts: list[str], depth: int) -> Iterator[dict[str, Any]]:
    for number, (sample, text) in enumerate(zip(batch, texts, strict=True)):
        layers = one.run.samples[number].layer_counts(depth)
        yield {
            "condition": name,
            "sample": sample.id,
            "image_id": sample.image_id or sample.id,
            "family": sample.family,
            "question": sample.question,
            "prediction": text,
            "answer": sample.answer,
            "correct": float(is_right(text, sample.answer)),
            "visual": len(one.run.samples[number].tokens),
            "asked": one.run.asked[number],
            "got": one.run.got[number],
            "processed": sum(layers) / depth,
            "output": sum([*layers[1:], layers[-1]]) / depth,
        }
