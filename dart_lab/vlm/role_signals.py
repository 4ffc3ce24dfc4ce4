"""The signals "role:NAME": which visual tokens the caller says have a role, wherever a method asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.marked import ROLE
from dart_lab.pruners.reduction import PAD
from dart_lab.vlm.run import Sample

Roles = Mapping[str, ArrayLike]


class RoleSignals:
    """Roles of samples in the order in which a block meets them; each is role → `(n,)` bool over its visual tokens."""

    def __init__(self, given: Sequence[Roles]) -> None:
        if isinstance(given, Mapping) or not all(isinstance(one, Mapping) for one in given):
            raise DartLabError("roles: give one mapping a sample, role → mask, such as what Rolebook.assign returns")
        self._given, self._met = given, list[Sample]()

    def providers(
        self, samples: Sequence[Sample], expand: int, number: Tensor, positions: Tensor, length: int
    ) -> dict[str, Callable[[], Tensor]]:
        """One provider a role.

        Args:
            samples: of the batch, one for every `expand` rows.
            expand: rows of a sample.
            number: `(batch, n)` int64, which visual token of its sample each visual token here is.
            positions: `(batch, n)` int64, where in the sequence it is; -1 after the end.
            length: of the sequence.
        """
        own = [self._of(sample) for sample in samples]
        names = sorted(set.intersection(*(set(one) for one in own))) if own else []
        here = (samples, expand, number, positions, length)
        return {f"{ROLE}{name}": partial(_marks, [one[name] for one in own], *here, name) for name in names}

    def _of(self, sample: Sample) -> Roles:
        for place, known in enumerate(self._met):
            if known is sample:
                return self._given[place]
        if len(self._met) == len(self._given):
            raise DartLabError(f"roles are given for {len(self._given)} samples, but another one came; give them all")
        self._met.append(sample)
        return self._given[len(self._met) - 1]


def _marks(
    given: Sequence[Any], samples: Sequence[Sample], expand: int, number: Tensor, positions: Tensor, length: int,
    name: str,
) -> Tensor:  # fmt: skip
    """`(batch, length)` bool."""
    out = torch.zeros(len(number), length + 1, dtype=torch.bool, device=number.device)
    for row in range(len(number)):
        mask, tokens = np.asarray(given[row // expand], dtype=bool), len(samples[row // expand].tokens)
        if mask.shape != (tokens,):
            raise DartLabError(f"role {name!r} has shape {mask.shape}, the sample has {tokens} visual tokens")
        here = positions[row] != PAD
        marked = torch.from_numpy(mask).to(number.device)[number[row][here].clamp(min=0)]
        out[row, positions[row][here]] = marked
    return out[:, :-1]
