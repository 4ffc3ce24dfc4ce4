"""Plain loops that say what a method should do, slow and obvious, to hold the tensor code against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor


def top_k_twin(score: Sequence[float], count: int) -> list[int]:
    """The `count` best places, best first, equal scores by place."""
    return sorted(range(len(score)), key=lambda i: (-score[i], i))[:count]


def key_norms(keys: Tensor) -> list[float]:
    """L1 norm of every token's key, heads together: `(kv_heads, sequence, head_dim)` → sequence numbers."""
    heads, sequence, width = keys.shape
    return [sum(abs(float(keys[h, s, d])) for h in range(heads) for d in range(width)) for s in range(sequence)]


def cosine_twin(a: Tensor, b: Tensor) -> float:
    x, y = a.double().numpy(), b.double().numpy()
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def dart_twin(
    states: Tensor, keys: Tensor, visual: Iterable[int], *, quotas: Sequence[int],
    pivots: Sequence[int] | None = None, image_pivots: int = 4, text_pivots: int = 4,
) -> list[int]:
    """Greedy DART on one sample, position by position: the kept positions, ascending.

    `pivots` fixes the pivots and their order; otherwise they are chosen by key norm, image pivots first.
    """
    span = list(visual)
    if pivots is None:
        norms = key_norms(keys)
        text = range(span[-1] + 1, len(norms))
        pivots = [span[i] for i in top_k_twin([norms[s] for s in span], image_pivots)]
        pivots += [text[i] for i in top_k_twin([norms[s] for s in text], text_pivots)]
    kept = {p for p in pivots if p in span}
    pool = [s for s in span if s not in kept]
    for pivot, quota in zip(pivots, quotas, strict=True):
        pool.sort(key=lambda s: (np.float32(cosine_twin(states[pivot], states[s])), s))
        kept |= set(pool[:quota])
        pool = pool[quota:]
    return sorted(kept)
