"""How many tokens to keep: a number, or a share of the sample's visual tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dart_lab.errors import DartLabError


def check_keep(keep: object) -> None:
    """Raise `DartLabError` unless `keep` is a whole number ≥ 1 or a retention ratio in (0, 1]."""
    if isinstance(keep, bool) or not isinstance(keep, (int, float)):
        raise DartLabError(f"keep={keep!r}: give the number of visual tokens to keep (128) or a retention ratio (0.25)")
    if isinstance(keep, int) and keep < 1:
        raise DartLabError(f"keep={keep}: keep at least 1 visual token (the condition without any is method 'none-kept')")
    if isinstance(keep, float) and not (0.0 < keep <= 1.0 and math.isfinite(keep)):
        raise DartLabError(f"keep={keep}: a retention ratio lies in (0, 1]; for a number of tokens give a whole number")


def resolve_keep(keep: int | float, size: Tensor) -> Tensor:
    """Tokens to keep in each sample.

    Args:
        keep: whole number of tokens, or retention ratio in (0, 1] (rounded half up, at least 1).
        size: `(batch,)` int64, visual tokens of each sample.

    Returns:
        `(batch,)` int64.

    Raises:
        DartLabError: a number larger than a sample's visual tokens.

    >>> resolve_keep(0.25, torch.tensor([576, 10]))
    tensor([144,   3])
    """
    check_keep(keep)
    if isinstance(keep, float):
        return (size.double() * keep + 0.5).floor().long().clamp(min=1).minimum(size)
    short = [int(n) for n in size.tolist() if n < keep]
    if short:
        raise DartLabError(
            f"keep={keep} but a sample has only {short[0]} visual tokens; give at most {min(short)}, or a retention ratio"
        )
    return torch.full_like(size, keep)
