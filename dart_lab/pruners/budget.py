"""How many tokens to keep: a number, or a share of the sample's visual tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, did_you_mean


def check_keep(keep: object) -> None:
    """Raise `DartLabError` unless `keep` is a whole number ≥ 1 or a retention ratio in (0, 1]."""
    if isinstance(keep, bool) or not isinstance(keep, (int, float)):
        raise DartLabError(f"keep={keep!r}: give the number of visual tokens to keep (128) or a retention ratio (0.25)")
    if isinstance(keep, int) and keep < 1:
        raise DartLabError(f"keep={keep}: keep at least 1 visual token (keeping none is the method 'none-kept')")
    if isinstance(keep, float) and not (0.0 < keep <= 1.0 and math.isfinite(keep)):
        raise DartLabError(f"keep={keep}: a retention ratio lies in (0, 1]; for a number of tokens give a whole number")


def check_one_of(method: str, **given: object) -> None:
    """Raise `DartLabError` unless exactly one of these ways of saying how much to keep is given (not None)."""
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise DartLabError(f"{method}: give exactly one of {', '.join(given)}; got {' and '.join(named) or 'none'}")


def check_reduction_ratio(method: str, ratio: float | None, budget: str) -> None:
    """Raise `DartLabError` unless the removed share lies in [0, 1] and the budget is "official"."""
    if ratio is None:
        return
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise DartLabError(f"{method}: reduction_ratio={ratio!r}: give the removed share, from 0 to 1")
    if budget != "official":
        raise DartLabError(
            f"{method}: reduction_ratio={ratio} is how the released code is told; give budget='official' with it, or "
            f"keep={round(1 - ratio, 4)} (the retained share)"
        )


def check_choice(method: str, name: str, given: object, allowed: Iterable[object]) -> None:
    """Raise `DartLabError` unless `given` is one of `allowed`."""
    options = tuple(allowed)
    if given not in options:
        hint = did_you_mean(str(given), [option for option in options if isinstance(option, str)])
        raise DartLabError(f"{method}: {name}={given!r} is not known. {hint}")


def retained(keep: int | float | None, reduction_ratio: float | None) -> int | float:
    """What stays: `keep` as given (tokens or share), else the share that a removed share leaves.

    >>> retained(None, 0.75)
    0.25
    """
    if reduction_ratio is not None:
        return 1 - reduction_ratio
    if keep is None:
        raise DartLabError("keep is missing; give keep=128 (tokens) or keep=0.25 (retention ratio)")
    return keep


def resolve_keep(keep: int | float, size: Tensor) -> Tensor:
    """Tokens to keep in each sample.

    Args:
        keep: whole number of tokens, or retention ratio in (0, 1] (rounded half up, at least 1).
        size: `(batch,)` int64, visual tokens of each sample; a sample without any has none to keep.

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
    short = [int(n) for n in size.tolist() if 0 < n < keep]
    if short:
        raise DartLabError(
            f"keep={keep} but a sample has only {short[0]} visual tokens; give at most {min(short)}, or a ratio"
        )
    return torch.full_like(size, keep).minimum(size)
