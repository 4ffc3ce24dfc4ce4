"""Traces with a known truth: which cells are kept is drawn from weights that belong to the place or to the content."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

Weights = Callable[[int, np.random.Generator], np.ndarray]


def keep_by(weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` cells without replacement, more likely where the weight is larger: `(rows, columns)` bool."""
    noise = rng.gumbel(size=weights.shape)
    score = np.log(np.maximum(weights, 1e-300)) + noise
    mask = np.zeros(weights.size, dtype=bool)
    mask[np.argsort(-score, axis=None)[:count]] = True
    return mask.reshape(weights.shape)


def trace(
    masks: list[np.ndarray], *, method: str = "planted", keep: str | None = None, flip: str = "none"
) -> pd.DataFrame:
    """A trace of one condition from one `(rows, columns)` bool mask a sample."""
    tables = []
    for number, mask in enumerate(masks):
        row, column = (part.ravel() for part in np.mgrid[: mask.shape[0], : mask.shape[1]])
        kept = int(mask.sum())
        tables.append(
            pd.DataFrame(
                {
                    "sample": number, "image": 0, "frame": 0, "crop": 0, "row": row, "column": column,
                    "kept": mask.ravel(), "method": method, "stage": "LLM_LAYER", "layer": 2, "asked": kept,
                    "got": kept, "image_id": f"picture-{number}", "keep": keep or str(kept), "flip": flip,
                }
            )
        )
    return pd.concat(tables, ignore_index=True)


def planted(
    *, place: np.ndarray, content: Weights | None = None, n: int, count: int, seed: int, method: str = "planted"
) -> pd.DataFrame:
    """Pictures as they are and upside down: weight of a cell = its place's × its content's.

    The content's weights of a picture turn with the picture, the place's stay.
    """
    rng = np.random.default_rng(seed)
    as_is, turned = [], []
    for number in range(n):
        inside = np.ones_like(place) if content is None else content(number, rng)
        as_is.append(keep_by(place * inside, count, rng))
        turned.append(keep_by(place * inside[::-1], count, rng))
    return pd.concat([trace(as_is, method=method), trace(turned, method=method, flip="vertical")], ignore_index=True)
