"""OPERA's summary token: a column of the answer's own attention that later tokens lean on (arXiv 2311.17911)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dart_lab.errors import DartLabError


@dataclass(frozen=True, eq=False, kw_only=True)
class SummaryToken:
    """Scores of the answer's tokens as summary tokens.

    `score` `(batch, tokens)` float32, natural logarithm of the column product; `token` `(batch,)` int64, the column
    with the largest one (the lower of equal ones).
    """

    score: Tensor
    token: Tensor


def summary_token(attention: Tensor, *, scale: float = 50.0, own: bool = True) -> SummaryToken:
    """Log of the product of each column below its diagonal: Σ_{i ≥ j} log(scale · A[i, j]).

    In OPERA the largest column of a window marks a token that the rest of the answer summarises from, often where an
    invention begins. The products themselves leave the range of float32 within a few dozen tokens; logarithms do not.

    Args:
        attention: `(batch, heads, tokens, tokens)`, attention of the answer's tokens to each other in the last layer,
            causal. Heads are reduced by their largest value; rows are then made to sum to 1.
        scale: factor before the product. Default 50.
        own: whether a column's product begins with its own row. Default True.

    Raises:
        DartLabError: a shape that is not (batch, heads, tokens, tokens), no tokens, or a scale that is not above 0.

    >>> rows = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.6, 0.2, 0.2]])[None, None]
    >>> summary_token(rows).token
    tensor([0])
    """
    if attention.dim() != 4 or attention.shape[2] != attention.shape[3] or 0 in attention.shape:
        raise DartLabError(
            f"attention has shape {tuple(attention.shape)}; expected (batch, heads, tokens, tokens), none of them 0"
        )
    if not scale > 0:
        raise DartLabError(f"scale={scale}: give a number above 0")
    n = attention.shape[2]
    below = torch.ones(n, n, dtype=torch.bool, device=attention.device).tril(0 if own else -1)
    rows = attention.float().amax(dim=1)
    rows = rows / rows.sum(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    score = (rows * scale).log().masked_fill(~below, 0.0).sum(dim=1)
    return SummaryToken(score=score, token=score.argmax(dim=1))
