"""Pooling: the mean of every cell of a coarser grid, the baseline of methods that merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.pruners.assignment import merge_assigned
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.selectors import ascending
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.uniform_grid import lattice


@dataclass(frozen=True, kw_only=True)
class Pooling(Pruner):
    """Cut each crop into as many cells as tokens are wanted and average each cell.

    The cells are those whose centres `UniformGrid` keeps: bands of rows of about equal height, each cut into about
    equal pieces, so that any number comes out exactly; 144 of 24×24 are cells of 2×2, 64 of 3×3. Every patch is in one
    cell. The centre of a cell represents it. Tokens whose grid is unknown or incomplete are pooled as one line.

    Args:
        keep: tokens to keep in each crop, or retention ratio.

    >>> row, column = torch.meshgrid(torch.arange(2), torch.arange(4), indexing="ij")
    >>> grid = torch.stack([row * 0, row * 0, row, column], dim=-1).reshape(1, 8, 4)
    >>> pooled = Pooling(keep=2)(Signals.of(visual=torch.arange(8)[None], grid=grid))
    >>> pooled.apply(torch.arange(8.0).reshape(1, 8, 1))[0, :, 0]
    tensor([2.5000, 4.5000])

    Differs from the official code in: there is none. The papers that report pooling give neither the cells nor what
    happens when the number is no product; both are this package's choice, and so is pooling behind the projector.
    """

    name: ClassVar[str] = "pooling"
    needs: ClassVar[frozenset[str]] = frozenset()
    positions: ClassVar[PositionPolicy] = "compact"

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("PROJECTED")

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Put every token into its cell."""
        cell = torch.full_like(signals.visual, PAD)
        slots = torch.full((len(asked), int(asked.max())), PAD, device=asked.device)
        for row, (n, m) in enumerate(zip(signals.counts.tolist(), asked.tolist(), strict=True)):
            rows, columns, place = grid_of(signals, row, n)
            token_at = (place[:, 0] * columns + place[:, 1]).argsort()
            centres = torch.tensor(lattice(rows, columns, m), device=place.device)
            slots[row, :m] = token_at[centres[:, 0] * columns + centres[:, 1]]
            cell[row, :n] = cells(rows, columns, m, place)
        merge, sizes = merge_assigned(cell, slots.shape[1])
        return Reduction(
            keep=ascending(slots), size=signals.counts, asked=asked, slots=slots, merge=merge, sizes=sizes
        )


def grid_of(signals: Signals, row: int, n: int) -> tuple[int, int, Tensor]:
    """Rows and columns of a crop and the `(n, 2)` places of its tokens; one line if they do not fill a grid."""
    if signals.grid is not None:
        place = signals.grid[row, :n, 2:]
        rows, columns = (place.amax(dim=0) + 1).tolist()
        if rows * columns == n and bool((place >= 0).all()):
            return rows, columns, place
    line = torch.arange(n, device=signals.visual.device)
    return 1, n, torch.stack([torch.zeros_like(line), line], dim=1)


def cells(rows: int, columns: int, m: int, place: Tensor) -> Tensor:
    """Which of m cells each place `(n, 2)` of a rows × columns grid belongs to: `(n,)` int64, row by row.

    >>> cells(1, 5, 2, torch.tensor([[0, 0], [0, 1], [0, 2], [0, 3], [0, 4]]))
    tensor([0, 0, 1, 1, 1])
    """
    centres = torch.tensor(lattice(rows, columns, m), device=place.device)
    per_band = centres[:, 0].unique_consecutive(return_counts=True)[1]
    band = (2 * place[:, 0] + 1) * len(per_band) // (2 * rows)
    piece = (2 * place[:, 1] + 1) * per_band[band] // (2 * columns)
    return (per_band.cumsum(dim=0) - per_band)[band] + piece
