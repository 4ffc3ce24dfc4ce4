"""Uniform grid: keep tokens spread evenly over the image, whatever it shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals


@dataclass(frozen=True, kw_only=True)
class UniformGrid(Pruner):
    """Keep the centres of equal cells: 144 of 24×24 tokens are one in every 2×2 cell, 64 one in every 3×3 cell.

    For m tokens of a grid of R rows and C columns, about √(m·R/C) rows are used, spread evenly, and the m tokens are
    dealt to them evenly, so that numbers that are no product also come out exactly, with rows that differ by at most
    one token. Several images or crops share the number in proportion to their size (largest remainder, ties to the
    first). Tokens off the grid (newlines) come last. Without grid information the tokens count as one row.

    Args:
        keep: visual tokens to keep, or retention ratio.

    >>> row, column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    >>> grid = torch.stack([row * 0, row * 0, row, column], dim=-1).reshape(1, 16, 4)
    >>> UniformGrid(keep=4)(Signals.of(visual=torch.arange(16)[None], grid=grid)).keep
    tensor([[ 5,  7, 13, 15]])

    Differs from the official code in: there is none; this is the one-token-a-cell coverage that pooling and
    window-wise selection are compared with.
    """

    name: ClassVar[str] = "uniform-grid"
    needs: ClassVar[frozenset[str]] = frozenset()

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Cover each sample's grids one by one."""
        mask = torch.zeros(signals.visual.shape, dtype=torch.bool)
        for row, (n, m) in enumerate(zip(signals.counts.tolist(), asked.tolist(), strict=True)):
            cells = None if signals.grid is None else signals.grid[row, :n].tolist()
            mask[row, cover(cells, n, m)] = True
        return Reduction.from_mask(mask.to(signals.visual.device), signals.counts, asked=asked)


def cover(cells: Sequence[Sequence[int]] | None, n: int, m: int) -> list[int]:
    """Pick m of n tokens evenly; `cells` gives (image, crop, row, column) of each token, -1 off the grid."""
    if cells is None:
        return spread(n, m)
    grids: dict[tuple[int, int], list[int]] = {}
    off_grid = []
    for token, (image, crop, row, column) in enumerate(cells):
        if row < 0 or column < 0:
            off_grid.append(token)
        else:
            grids.setdefault((image, crop), []).append(token)
    on_grid = min(m, n - len(off_grid))
    shares = proportional(on_grid, [len(tokens) for tokens in grids.values()])
    picked = [off_grid[i] for i in spread(len(off_grid), m - on_grid)]
    for tokens, share in zip(grids.values(), shares, strict=True):
        at = {(cells[t][2], cells[t][3]): t for t in tokens}
        rows, columns = sorted({r for r, _ in at}), sorted({c for _, c in at})
        whole = len(at) == len(tokens) == len(rows) * len(columns)
        places = lattice(len(rows), len(columns), share) if whole else [(0, i) for i in spread(len(tokens), share)]
        picked += [at[rows[r], columns[c]] if whole else tokens[c] for r, c in places]
    return picked


def lattice(rows: int, columns: int, m: int) -> list[tuple[int, int]]:
    """Choose m places of a rows × columns grid, spread evenly in both directions."""
    if m == 0:
        return []
    ideal = round(math.sqrt(m * rows / columns))
    used = max(math.ceil(m / columns), min(max(ideal, 1), rows, m))
    places = []
    for i, row in enumerate(spread(rows, used)):
        in_row = (i + 1) * m // used - i * m // used
        places += [(row, column) for column in spread(columns, in_row)]
    return places


def spread(n: int, m: int) -> list[int]:
    """Choose m of n places on a line, each the centre of an equal piece.

    >>> spread(9, 3)
    [1, 4, 7]
    """
    return [(2 * i + 1) * n // (2 * m) for i in range(m)]


def proportional(total: int, sizes: Sequence[int]) -> list[int]:
    """Share `total` out in proportion to `sizes`: whole numbers that add up; ties in the remainder go to the first.

    >>> proportional(10, [576, 576, 288])
    [4, 4, 2]
    """
    whole = sum(sizes)
    shares = [total * size // whole for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(total * sizes[i] % whole))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
