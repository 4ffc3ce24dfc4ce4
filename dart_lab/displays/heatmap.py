"""Heat maps of how often each place is kept, in units of the uniform rate."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import ArrayLike

from dart_lab.displays.style import DIVERGING
from dart_lab.errors import DartLabError

#: The shared scale: 0 (never kept) over 1 (as often as by chance) to 2; more is drawn in the colour of 2.
RATE = Normalize(vmin=0.0, vmax=2.0, clip=True)


def heat_map(ax: Axes, rate: ArrayLike) -> AxesImage:
    """Draw how often each cell is kept; one is white, more red, less blue, on a scale that all our maps share.

    Args:
        ax: where to draw.
        rate: `(rows, columns)` numbers ≥ 0: how often a cell is kept, divided by the retention ratio (1: as often as by
            uniform chance).

    Raises:
        DartLabError: not a table of finite numbers ≥ 0.

    >>> ax = Figure().subplots()
    >>> heat_map(ax, [[0.0, 1.0], [1.0, 2.0]]).norm.vmax
    2.0
    """
    values = np.asarray(rate, dtype=np.float64)
    if values.ndim != 2 or not np.isfinite(values).all() or (values < 0).any():
        raise DartLabError(f"a heat map needs finite rates ≥ 0 of shape (rows, columns), got shape {values.shape}")
    image = ax.imshow(values, cmap=DIVERGING, norm=RATE, interpolation="nearest", aspect="equal")
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(visible=True, linewidth=0.6, color="0.4")
    return image


def rate_colorbar(figure: Figure, cax: Axes, **options: Any) -> Colorbar:
    """The key of the shared scale, in `cax`."""
    bar = figure.colorbar(ScalarMappable(norm=RATE, cmap=DIVERGING), cax=cax, extend="max", **options)
    bar.set_ticks([0, 0.5, 1, 1.5, 2], labels=["0", "½", "1", "1½", "2×"])
    return bar
