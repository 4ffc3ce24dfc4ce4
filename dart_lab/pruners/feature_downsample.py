"""FeatureDownsample: resize the grid of features as one resizes a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.pooling import grid_of
from dart_lab.pruners.reduction import PAD, Merge, Reduction
from dart_lab.pruners.selectors import ascending
from dart_lab.pruners.signals import Signals

Filter = Literal["area", "bilinear", "nearest-exact"]


@dataclass(frozen=True, kw_only=True)
class FeatureDownsample(Pruner):
    """Resize each crop's grid of projected features to h × w tokens, h·w being the number wanted.

    Of all such h and w the pair nearest to the grid's own proportions is used; a number without one is refused.
    The token nearest to a new one's centre represents it.

    Args:
        keep: tokens to keep in each crop, or retention ratio.
        filter: "area" (default: mean of the covered patches, windows overlap where sizes do not divide), "bilinear"
            (triangle filter as wide as the step, as in resizing pictures) or "nearest-exact".

    This is not the down-sampling of pixels that some papers report: for that, see `dart_lab.tasks.coarse`.

    Raises `DartLabError` for a number that is no product of two sides, and where the grid is unknown.

    >>> row, column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    >>> grid = torch.stack([row * 0, row * 0, row, column], dim=-1).reshape(1, 16, 4)
    >>> FeatureDownsample(keep=4)(Signals.of(visual=torch.arange(16)[None], grid=grid)).weights()[0, 0].reshape(4, 4)
    tensor([[0.2500, 0.2500, 0.0000, 0.0000],
            [0.2500, 0.2500, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000]])

    Differs from the official code in: there is none.
    """

    name: ClassVar[str] = "feature-downsample"
    needs: ClassVar[frozenset[str]] = frozenset()
    positions: ClassVar[PositionPolicy] = "compact"

    filter: Filter = "area"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "filter", self.filter, get_args(Filter))

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("PROJECTED")

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Weights of a separable resize, crop by crop."""
        m, n = int(asked.max()), signals.visual.shape[1]
        weights = torch.zeros(len(asked), m, n, device=asked.device)
        slots = torch.full((len(asked), m), PAD, device=asked.device)
        for row, (size, wanted) in enumerate(zip(signals.counts.tolist(), asked.tolist(), strict=True)):
            rows, columns, place = grid_of(signals, row, size)
            if signals.grid is None or (rows == 1 and bool((signals.grid[row, :size, 2] != 0).any())):
                raise DartLabError(f"{self.name}: the places of this model's patches are unknown; use pooling")
            height, width = sides(rows, columns, wanted)
            down, across = resize(rows, height, self.filter), resize(columns, width, self.filter)
            grid_weights = torch.einsum("hr,wc->hwrc", down, across).reshape(wanted, size).to(weights.device)
            at = place[:, 0] * columns + place[:, 1]
            weights[row, :wanted, :size] = grid_weights[:, at]
            y = (2 * torch.arange(height) + 1) * rows // (2 * height)
            x = (2 * torch.arange(width) + 1) * columns // (2 * width)
            slots[row, :wanted] = at.argsort()[(y[:, None] * columns + x).reshape(-1).to(at.device)]
        stands_for = (signals.counts / asked)[:, None].float() * (slots != PAD)
        return Reduction(
            keep=ascending(slots), size=signals.counts, asked=asked, slots=slots, merge=Merge.from_dense(weights),
            sizes=stands_for,
        )


def sides(rows: int, columns: int, m: int) -> tuple[int, int]:
    """Height and width with height · width = m, at most rows × columns, in proportions nearest to rows : columns.

    Raises `DartLabError` naming the nearest numbers that have such sides.

    >>> sides(24, 24, 128)
    (8, 16)
    """
    def pairs(number: int) -> list[tuple[int, int]]:
        divisors = [h for h in range(1, rows + 1) if number % h == 0 and number // h <= columns]
        return [(h, number // h) for h in divisors]

    if not pairs(m):
        below = max(k for k in range(1, m) if pairs(k))
        above = min(k for k in range(m + 1, rows * columns + 1) if pairs(k))
        raise DartLabError(
            f"feature-downsample: {m} tokens are no height × width within {rows} × {columns}; give {below} or {above}, "
            "or use pooling, which keeps any number"
        )
    return min(pairs(m), key=lambda pair: abs(math.log(pair[0] * columns / (pair[1] * rows))))


def resize(old: int, new: int, kind: Filter) -> Tensor:
    """`(new, old)` float32 weights that resize a line of `old` places to `new`.

    >>> resize(4, 2, "bilinear")[0]
    tensor([0.4286, 0.4286, 0.1429, 0.0000])
    """
    if kind == "bilinear":
        step = old / new
        centre, place = (torch.arange(new) + 0.5) * step, torch.arange(old) + 0.5
        triangle = (1 - (place - centre[:, None]).abs() / max(step, 1.0)).clamp(min=0)
        return triangle / triangle.sum(dim=1, keepdim=True)
    each = torch.eye(old)[None, :, None, :]  # as many channels as places, each 1 at its own
    return torch.nn.functional.interpolate(each, size=(1, new), mode=kind)[0, :, 0, :].T
