"""What the cases of tower-side methods share: signals of crops, and the order in which their tokens are packed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals


def patches(rows: Tensor, **tensors: Tensor) -> Signals:
    """Signals of crops whose class token, at 0, pays `rows` `(crops, heads, n)` of attention to the patches.

    The other tensors are `(crops, n, channels)`, patches only. Any other query's attention is refused.
    """
    n = rows.shape[2]
    with_class = torch.nn.functional.pad(rows, (1, 0))

    def attention(queries: Tensor) -> Tensor:
        assert not queries.any(), "only the class token's row is known"
        return with_class[:, :, None, :]

    states = {name: torch.nn.functional.pad(value, (0, 0, 1, 0)) for name, value in tensors.items()}
    return Signals(
        visual=torch.arange(1, n + 1).expand(len(rows), -1), attended=torch.ones(len(rows), n + 1, dtype=torch.bool),
        providers={"attention": attention, **{name: partial(states.__getitem__, name) for name in states}},
        cls=torch.zeros(len(rows), dtype=torch.int64),
    )


def packed(kept: Reduction, grid: tuple[int, int] | None) -> list[int]:
    """Token numbers crop·n + token as they reach the LLM: the whole view, then the others row by row of the picture.

    `grid` is (columns, rows) of the crops; None: crop after crop.
    """
    n = int(kept.size[0])
    numbers = [[crop * n + t for t in row if t >= 0] for crop, row in enumerate(kept.keep.tolist())]
    rest = [number for crop in numbers[1:] for number in crop]
    if grid is not None:
        side = int(n**0.5)

        def place(number: int) -> tuple[int, int]:
            crop, token = number // n - 1, number % n
            return crop // grid[0] * side + token // side, crop % grid[0] * side + token % side

        rest.sort(key=place)
    return numbers[0] + rest
