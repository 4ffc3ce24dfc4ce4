"""Square windows on the patch grid."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.pruners.reduction import PAD

SPAN = 1 << 12  # more windows than any grid has along one side
OFF = torch.iinfo(torch.int64).max


def windows(grid: Tensor, valid: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Sort patches into non-overlapping windows of `side` × `side`; windows that the grid's border cuts are left out.

    Args:
        grid: `(batch, n, 4)` int64: image, crop, row, column; -1 off the grid.
        valid: `(batch, n)` bool.
        side: in patches.

    Returns:
        `home` `(batch, n)` int64, the window of each patch (-1: in none), windows counted in raster order, and `first`
        `(batch, w)` int64, the first patch of each window, padded with -1.

    >>> grid = torch.tensor([[[0, 0, r, c] for r in range(2) for c in range(3)]])
    >>> windows(grid, torch.ones(1, 6, dtype=torch.bool), 2)
    (tensor([[ 0,  0, -1,  0,  0, -1]]), tensor([[0]]))
    """
    image, crop, row, column = grid.unbind(dim=-1)
    on_grid = valid & (row != PAD)
    name = ((image * SPAN + crop) * SPAN + row // side) * SPAN + column // side
    name = torch.where(on_grid, name, OFF)
    order = name.argsort(dim=1, stable=True)
    ranked = name.gather(1, order)
    starts = torch.ones_like(ranked, dtype=torch.bool)
    starts[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    number = starts.cumsum(dim=1) - 1  # every window that has a patch
    members = torch.zeros_like(number).scatter_add(1, number, (ranked != OFF).long())
    whole = members == side * side
    renumber = torch.where(whole, whole.cumsum(dim=1) - 1, PAD)
    home = torch.empty_like(order).scatter(1, order, renumber.gather(1, number))
    width = int(whole.sum(dim=1).max()) if len(whole) else 0
    n = home.shape[1]
    place = torch.arange(n, device=home.device).expand_as(home)
    first = torch.full((len(home), width + 1), n, dtype=torch.int64, device=home.device)
    first = first.scatter_reduce(1, torch.where(home == PAD, width, home), place, reduce="amin")[:, :width]
    return home, torch.where(first == n, PAD, first)


def window_similarity(states: Tensor, home: Tensor, first: Tensor) -> Tensor:
    """Mean cosine of all pairs of different patches in each window: `(batch, w)` float32.

    Args:
        states: `(batch, n, channels)`.
        home, first: from `windows`.

    For unit vectors u of k patches it is (‖Σu‖² − Σ‖u‖²) / (k(k−1)), so no pair is formed.
    """
    unit = torch.nn.functional.normalize(states.float(), dim=-1)
    width = first.shape[1]
    index = torch.where(home == PAD, width, home)
    total = unit.new_zeros(len(unit), width + 1, unit.shape[2])
    total = total.scatter_add(1, index[:, :, None].expand_as(unit), unit)[:, :width]
    own = unit.new_zeros(len(unit), width + 1).scatter_add(1, index, unit.square().sum(dim=2))[:, :width]
    number = unit.new_zeros(len(unit), width + 1).scatter_add(1, index, torch.ones_like(index, dtype=unit.dtype))
    k = number[:, :width]
    return (total.square().sum(dim=2) - own) / (k * (k - 1)).clamp(min=1)
