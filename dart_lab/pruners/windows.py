"""Window-wise selection: every region of the picture keeps its share (Window FastV, arXiv 2502.11501)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.pruners.base import Pruner, ScorePruner
from dart_lab.pruners.fastv import FastV, NamedQuery
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.selectors import ascending, top_k
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.wrappers import Wrapper, check_ranks

Pair = tuple[int, int]
WINDOWS: Pair = (4, 4)  # of a 24×24 grid, sixteen windows of 6×6 tokens: 32, 64, 128, 144 and 192 share out evenly


@dataclass(frozen=True, kw_only=True)
class Windowed(Wrapper):
    """Take the best tokens of every window instead of the best of the whole picture.

    The grid of each image and crop is cut into windows, each gets its quota, and the quotas add up to exactly what was
    asked. A quota is ⌊keep · size / n⌋; the tokens left over go, one a window, to the windows with the largest
    remainder, among equals to the one whose next token ranks highest. Tokens off the grid (newlines) form one window
    of their own. One window is the plain method; as many tokens as equal windows are one in every window.

    Args:
        pruner: a method that ranks tokens, such as `FastV(keep=144)`.
        window: (rows, columns) of a window; windows at the right and lower edge may be smaller.
        windows: how many (down, across), as equal as possible. Default, if neither is given: (4, 4).

    The reduction's note `window` is `(batch, n)`: the window of each token, -1 after the end.
    Raises `DartLabError` for a method without scores and for windows that are no pair of whole numbers ≥ 1.
    Warns (`DartLabWarning`) where the tokens' places on the picture are unknown: all of them then form one window.

    >>> cells = torch.tensor([[[0, 0, row, column] for row in range(2) for column in range(4)]])
    >>> row = torch.tensor([8.0, 7.0, 1.0, 2.0, 6.0, 5.0, 4.0, 3.0]).expand(1, 1, 8, 8)
    >>> signals = Signals.of(visual=torch.arange(8)[None], attention=row, grid=cells)
    >>> FastV(keep=2)(signals).keep, Windowed(FastV(keep=2), window=(2, 2))(signals).keep
    (tensor([[0, 1]]), tensor([[0, 6]]))

    Differs from the official code in: none was released; the size of a window, the quota and what happens at the edge
    are not in the paper and are this package's choice.
    """

    verb: ClassVar[str] = "window"

    pruner: ScorePruner = field(kw_only=False)
    window: Pair | None = None
    windows: Pair | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranks("window", self.pruner)
        check_windows(self.name, self.window, self.windows)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Rank, then take each window's share."""
        return by_window(self.pruner.score(signals).float(), signals, asked, self.window, self.windows)


@dataclass(frozen=True, kw_only=True)
class WindowFastV(Pruner):
    """FastV within windows: `Windowed(FastV(…))` under a name of its own.

    Args:
        keep: visual tokens to keep, or retention ratio.
        window, windows: as in `Windowed`.
        query: as in `FastV`.

    >>> WindowFastV(keep=144).windows is None  # then four by four
    True

    Differs from the official code in: none was released, see `Windowed`.
    """

    name: ClassVar[str] = "window-fastv"
    needs: ClassVar[frozenset[str]] = FastV.needs
    paper: ClassVar[str] = "Token Pruning in Multimodal LLMs: Are We Solving the Right Problem?, arXiv 2502.11501"

    window: Pair | None = None
    windows: Pair | None = None
    query: NamedQuery | tuple[int, ...] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_windows(self.name, self.window, self.windows)
        self._fastv()

    def _fastv(self) -> FastV:
        return FastV(keep=self.keep, layer=self.layer, seed=self.seed, budget=self.budget, query=self.query)

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: what FastV is asked for."""
        return self._fastv().asked(signals)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """FastV's score, each window's share."""
        return by_window(self._fastv().score(signals).float(), signals, asked, self.window, self.windows)


def by_window(score: Tensor, signals: Signals, asked: Tensor, window: Pair | None, windows: Pair | None) -> Reduction:
    """The reduction that keeps each window's share of the best tokens."""
    if signals.grid is None:
        warnings.warn(
            "windows: where the visual tokens lie on the picture is unknown here, so they all form one window",
            DartLabWarning, stacklevel=2,
        )
    of = window_of(signals, window, windows)
    order = window_top_k(score, asked, signals.valid, of)
    return Reduction(
        keep=ascending(order), size=signals.counts, asked=asked, order=order,
        score=score.masked_fill(~signals.valid, float("nan")), notes={"window": of},
    )


def window_of(signals: Signals, window: Pair | None = None, windows: Pair | None = None) -> Tensor:
    """`(batch, n)` int64: the window of every token, counted from 0 in each sample; -1 after the end of a row."""
    if signals.grid is None:
        return torch.where(signals.valid, 0, PAD)
    image, crop, row, column = signals.grid.unbind(dim=2)
    on_grid = signals.valid & (row >= 0) & (column >= 0)
    sample = torch.arange(len(row), device=row.device)[:, None].expand_as(row)
    crops = torch.stack([sample, image, crop], dim=2).flatten(0, 1).unique(dim=0, return_inverse=True)[1].view_as(row)

    def cut(place: Tensor, axis: int) -> Tensor:
        if window is not None:
            return place // window[axis]
        last = torch.zeros(int(crops.max()) + 1, dtype=torch.int64, device=row.device)
        last.scatter_reduce_(0, crops[on_grid], place[on_grid], "amax")
        return place * (windows or WINDOWS)[axis] // (last[crops] + 1)

    labels = torch.stack([image, crop, cut(row, 0), cut(column, 1)], dim=2)
    labels = torch.where(on_grid[:, :, None], labels, PAD)  # those off the grid come first, as one window
    labels = torch.cat([sample[:, :, None], labels], dim=2)[signals.valid]
    number = torch.full_like(row, PAD)
    number[signals.valid] = labels.unique(dim=0, return_inverse=True)[1]
    first = number.masked_fill(~signals.valid, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
    return torch.where(signals.valid, number - first, PAD)


def window_top_k(score: Tensor, counts: Tensor, valid: Tensor, window: Tensor) -> Tensor:
    """The best tokens of every window, by the quotas that `Windowed` states.

    Args:
        score: `(batch, n)`, higher is better; equal scores go to the lower index.
        counts: `(batch,)` int64, how many to take in all.
        valid: `(batch, n)` bool.
        window: `(batch, n)` int64, as `window_of` gives it.

    Returns:
        `(batch, m)` int64, best first, padded with -1.

    >>> two = torch.tensor([[0, 0, 0, 1, 1, 1]])
    >>> window_top_k(torch.tensor([[6.0, 5, 4, 3, 2, 1]]), torch.tensor([3]), torch.ones(1, 6, dtype=torch.bool), two)
    tensor([[0, 1, 3]])
    """
    batch, n = score.shape
    size = valid.sum(dim=1, keepdim=True)
    rank = torch.full_like(window, n)  # of every token among all of its sample
    ranking = top_k(score, size[:, 0], valid)
    places = torch.arange(ranking.shape[1], device=score.device).expand_as(ranking)
    rank.scatter_(1, torch.where(ranking == PAD, n - 1, ranking), places)
    rank = torch.where(valid, rank, n)

    width = int(window.max()) + 2 if window.numel() else 1
    home = torch.where(valid, window, width - 1)  # the last window takes the padding
    sizes = torch.zeros(batch, width, dtype=torch.int64, device=score.device).scatter_add(1, home, valid.long())
    by_home = (home * (n + 1) + rank).argsort(dim=1, stable=True)
    starts = sizes.cumsum(dim=1) - sizes
    within = torch.empty_like(rank)  # rank of every token within its window
    within.scatter_(1, by_home, torch.arange(n, device=score.device) - starts.gather(1, home.gather(1, by_home)))

    share = counts[:, None] * sizes
    quota, remainder = share // size.clamp(min=1), share % size.clamp(min=1)
    following = torch.full_like(sizes, n)  # rank of the best token that the quota leaves
    following.scatter_reduce_(1, home, torch.where(within >= quota.gather(1, home), rank, n), "amin")
    queue = (following - remainder * (n + 1)).argsort(dim=1, stable=True)
    left = counts[:, None] - quota.sum(dim=1, keepdim=True)
    quota.scatter_add_(1, queue, (torch.arange(width, device=score.device) < left).long())
    return top_k(score, counts, valid & (within < quota.gather(1, home)))


def check_windows(method: str, window: Pair | None, windows: Pair | None) -> None:
    """Raise `DartLabError` unless at most one is given, as a pair of whole numbers ≥ 1."""
    if window is not None and windows is not None:
        raise DartLabError(f"{method}: window={window} and windows={windows}: give the size or the number, not both")
    for name, pair in (("window", window), ("windows", windows)):
        whole = isinstance(pair, tuple) and len(pair) == 2 and all(type(side) is int and side >= 1 for side in pair)
        if pair is not None and not whole:
            raise DartLabError(f"{method}: {name}={pair!r}: give (rows, columns), two whole numbers of at least 1")
