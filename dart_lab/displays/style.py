"""How our pictures look, and how they become the same bytes each time."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

#: Okabe and Ito's palette, told apart with any colour vision; black last.
PALETTE: tuple[str, ...] = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
#: Blue: rarely kept. White: as often as by chance. Red: often kept. Told apart with any colour vision.
DIVERGING = "RdBu_r"
#: The shade of a band or line that chance alone explains.
CHANCE = "#9A9A9A"
#: Dots per inch of a PNG.
DPI = 160

_RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "figure.titlesize": 12.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "pdf.fonttype": 42,
    "svg.hashsalt": "dart-lab",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Our fonts, sizes and colours, whatever the user's matplotlib settings; theirs come back at the end."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def png_bytes(figure: Figure, dpi: int = DPI) -> bytes:
    """A figure as PNG: no date, no version, so the same figure gives the same bytes."""
    return _saved(figure, "png", dpi=dpi, metadata={"Software": None})


def pdf_bytes(figure: Figure) -> bytes:
    """A figure as PDF with embedded fonts: no date, so the same figure gives the same bytes."""
    return _saved(figure, "pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})


def _saved(figure: Figure, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format=kind, **options)
    return buffer.getvalue()
