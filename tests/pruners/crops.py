"""Made-up crops for methods that act in or behind the vision tower."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.pruners.signals import Signals


def places(rows: int, columns: int) -> Tensor:
    """`(rows·columns, 4)`: image 0, crop 0, row, column."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([row * 0, row * 0, row, column], dim=-1).reshape(-1, 4)


def crops(
    count: int, rows: int, columns: int, *, seed: int = 0, class_token: bool = True, keeps_cls: bool = False,
    heads: int = 2, **tensors: Tensor,
) -> Signals:
    """Random crops in the tower; the class token, if there is one, stands first. Tensors given replace random ones."""
    n, generator = rows * columns, torch.Generator().manual_seed(seed)
    first, length = int(class_token), rows * columns + int(class_token)
    attention = torch.rand(count, heads, length, length, generator=generator).softmax(dim=3)
    made = {
        "attention": attention,
        "attention@0": torch.rand(count, heads, length, length, generator=generator).softmax(dim=3),
        "received": attention.mean(dim=1).sum(dim=1),
        "hidden": torch.randn(count, length, 6, generator=generator),
        "keys": torch.randn(count, heads, length, 5, generator=generator),
    }
    visual = torch.arange(0 if keeps_cls else first, length)
    grid = places(rows, columns)
    if keeps_cls and class_token:
        grid = torch.cat([torch.tensor([[0, 0, -1, -1]]), grid])
    assert len(visual) == n + int(keeps_cls and class_token)
    return Signals.of(
        visual=visual.expand(count, -1), grid=grid.expand(count, -1, -1),
        class_token=torch.zeros(count, dtype=torch.int64) if class_token else None, **(made | tensors),
    )


def class_row(*values: float) -> Tensor:
    """An attention map whose class token (at 0) pays the given attention to the patches."""
    n = len(values) + 1
    return torch.tensor([0.0, *values]).expand(1, 1, n, n).clone()
