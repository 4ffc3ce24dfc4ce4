"""A histogram that grows as tokens stream by, and the cuts that are read from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dart_lab.errors import DartLabError

Floats = NDArray[np.float64]

#: Median absolute deviation × this = standard deviation, for normally distributed values.
_MAD_TO_SD = 1.4826


@dataclass(eq=False)
class Histogram:
    """Counts of values in bins of one width, wherever they lie; memory grows with the range, not with the number.

    Attributes:
        width: of a bin.
        counts: bin number → count; bin i holds values in [i · width, (i + 1) · width).

    >>> seen = Histogram(0.5)
    >>> seen.add([0.1, 0.2, 1.9])
    >>> seen.total, seen.quantile(0.5)
    (3, 0.25)
    """

    width: float
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.width > 0:
            raise DartLabError(f"width={self.width}: a bin has a width above 0")

    def add(self, values: ArrayLike) -> None:
        """Count values `(…)`. Raises `DartLabError` for one that is not finite."""
        flat = np.asarray(values, dtype=np.float64).ravel()
        if not np.isfinite(flat).all():
            raise DartLabError("a value is NaN or infinite; the states of this model are broken on some picture")
        for number, count in zip(
            *np.unique(np.floor(flat / self.width).astype(np.int64), return_counts=True), strict=True
        ):
            self.counts[int(number)] = self.counts.get(int(number), 0) + int(count)

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts.values())

    def dense(self) -> tuple[Floats, Floats]:
        """Bin centres and counts from the lowest to the highest occupied bin, `(bins,)` each."""
        if not self.counts:
            raise DartLabError("the histogram is empty: no token was seen")
        low, high = min(self.counts), max(self.counts)
        count = np.zeros(high - low + 1)
        for number, seen in self.counts.items():
            count[number - low] = seen
        return np.asarray((np.arange(low, high + 1) + 0.5) * self.width, dtype=np.float64), count

    def quantile(self, share: float) -> float:
        """Centre of the bin in which a share of the values is reached."""
        centre, count = self.dense()
        place = int(np.searchsorted(count.cumsum(), share * count.sum()))
        return float(centre[min(place, len(centre) - 1)])

    def robust_sd(self) -> float:
        """1.4826 × median absolute deviation from the median, at least a bin's width."""
        centre, count = self.dense()
        away = np.abs(centre - self.quantile(0.5))
        order = np.argsort(away, kind="stable")
        place = int(np.searchsorted(count[order].cumsum(), count.sum() / 2))
        return max(_MAD_TO_SD * float(away[order][place]), self.width)

    def otsu(self) -> float:
        """The edge that separates two groups with the largest variance between them (Otsu 1979)."""
        centre, count = self.dense()
        if len(centre) < 2:
            raise DartLabError("all values are the same: there are no two groups to tell apart")
        below = count.cumsum()[:-1]
        above = count.sum() - below
        mean_below = (count * centre).cumsum()[:-1] / below
        mean_above = ((count * centre).sum() - (count * centre).cumsum()[:-1]) / above
        spread = below * above * (mean_above - mean_below) ** 2
        best = np.flatnonzero(spread >= spread.max() * (1 - np.sqrt(np.finfo(np.float64).eps)))
        return float(centre[best].mean() + self.width / 2)  # a plateau of empty bins is cut in its middle

    def share_above(self, cut: float) -> float:
        """Share of the values above a cut."""
        centre, count = self.dense()
        return float(count[centre > cut].sum() / count.sum())

    def valley(self, *, smooth: int = 3) -> tuple[float, float]:
        """The emptiest place between the modes of the two groups that Otsu's cut separates, and how deep it is.

        Otsu's cut itself lies inside the wider of two unequal groups.

        Args:
            smooth: bins that are averaged, odd. Default 3.

        Returns:
            The cut, an edge between bins, and `valley_depth` there.

        >>> seen = Histogram(0.1)
        >>> seen.add([0.05] * 5 + [0.15] * 9 + [0.25] * 5 + [0.85] * 40)
        >>> cut, depth = seen.valley()
        >>> 0.3 < cut < 0.8, depth
        (True, 1.0)
        """
        centre, count = self.dense()
        first = int((centre <= self.otsu()).sum())
        even = np.convolve(np.pad(count, smooth // 2, mode="edge"), np.ones(smooth) / smooth, mode="valid")
        low, high = int(even[:first].argmax()), first + int(even[first:].argmax())
        between = even[low : high + 1]
        lowest = low + np.flatnonzero(between == between.min())
        cut = float(centre[lowest].mean() + self.width / 2) if len(lowest) > 1 else float(centre[lowest[0]])
        peak = min(even[low], even[high])
        return cut, float(max(1 - between.min() / peak, 0.0)) if peak > 0 else 0.0

    def valley_depth(self, cut: float, *, smooth: int = 3) -> float:
        """How empty the histogram is at a cut: 1 − count there / lower of the highest counts on either side.

        0: no valley at all; 1: nothing lies at the cut. `smooth` bins are averaged.
        """
        centre, count = self.dense()
        even = np.convolve(np.pad(count, smooth // 2, mode="edge"), np.ones(smooth) / smooth, mode="valid")
        left, right = even[centre <= cut], even[centre > cut]
        if not len(left) or not len(right):
            return 0.0
        peak = min(left.max(), right.max())
        at = min(left[-1], right[0])
        return float(max(1 - at / peak, 0.0)) if peak > 0 else 0.0
