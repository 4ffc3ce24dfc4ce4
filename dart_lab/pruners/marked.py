"""Visual tokens that the caller marks, by a mask or by a role: what protection and removal share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.budget import check_one_of
from dart_lab.pruners.signals import Signals

#: Prefix of the signal that says which tokens have a role: "role:dead".
ROLE = "role:"


def check_marking(name: str, mask: Tensor | None, role: str | None) -> None:
    """Raise `DartLabError` unless exactly one is given, and the mask is one of bool."""
    check_one_of(name, mask=None if mask is None else "…", role=role)
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
        raise DartLabError(f"{name}: mask must be a tensor of bool, (n,) or (batch, n)")


def marked(name: str, signals: Signals, mask: Tensor | None, role: str | None) -> Tensor:
    """`(batch, n)` bool: the marked tokens. Raises `DartLabError` for a mask of another length."""
    if role is not None:
        found = signals.get(f"{ROLE}{role}").bool()
        return found.gather(1, signals.visual.clamp(min=0)) & signals.valid
    shape = tuple(signals.visual.shape)
    if mask is None or tuple(mask.shape) not in (shape, shape[1:]):
        raise DartLabError(
            f"{name}: mask has shape {None if mask is None else tuple(mask.shape)}, but there are {shape[1]} "
            f"visual tokens here; give ({shape[1]},), or {shape} for each sample its own"
        )
    return mask.to(signals.visual.device) & signals.valid


def marked_numbers(mask: Tensor | None) -> Any:
    """A mask as lists of marked tokens, for records."""
    return None if mask is None else [torch.where(row)[0].tolist() for row in torch.atleast_2d(mask)]
