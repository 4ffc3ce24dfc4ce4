"""Which visual tokens stay, shown on the picture: kept cells bright, pruned cells veiled."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from dart_lab.displays.style import house_style
from dart_lab.errors import DartLabError

Pixels = NDArray[np.uint8]

_VEIL = 0.72  # share of grey in a pruned cell
_GREY = 118  # between black and white, so that a veil shows on either
_EDGE = (230, 159, 0)  # orange line between kept and pruned cells
_LONG_SIDE = 720  # pixels; smaller pictures are enlarged by a whole factor, larger ones shrunk


class Tokens(Protocol):
    """What the overlay reads of a sample's layout (see `dart_lab.vlm.layout.VisualTokens`)."""

    @property
    def image(self) -> NDArray[np.int64]:
        """`(n,)` number of the picture each token belongs to."""

    @property
    def box(self) -> NDArray[np.float64]:
        """`(n, 4)` x0, y0, x1, y1 in pixels of the picture; NaN for tokens without a place."""


def overlay_pixels(image: Image.Image, tokens: Tokens, kept: ArrayLike, *, number: int = 0) -> Pixels:
    """The picture with its pruned cells veiled in grey and a line round its kept cells.

    A cell is what one visual token's box covers. With several crops the picture is shown once, and a place is bright
    if a token of any crop keeps it.

    Args:
        image: the picture the model saw, before resizing.
        tokens: the sample's visual tokens.
        kept: indices of the kept tokens within the sample.
        number: which of the sample's pictures this is. Default 0.

    Returns:
        `(height, width, 3)` uint8; a small picture comes back enlarged by a whole factor, a large one shrunk.

    Raises:
        DartLabError: an index outside the sample, or a picture without placed tokens.

    >>> from types import SimpleNamespace
    >>> two = SimpleNamespace(image=np.zeros(2), box=np.array([[0, 0, 5, 10], [5, 0, 10, 10]]))
    >>> pixels = overlay_pixels(Image.new("RGB", (10, 10), "white"), two, [1])
    >>> pixels.shape, pixels[200, 100].tolist(), pixels[200, 400].tolist()
    ((720, 720, 3), [156, 156, 156], [255, 255, 255])
    """
    chosen = np.asarray(kept, dtype=np.int64).ravel()
    if len(chosen) and not (chosen.min() >= 0 and chosen.max() < len(tokens.box)):
        outside = chosen[(chosen < 0) | (chosen >= len(tokens.box))][0]
        raise DartLabError(f"kept index {outside} is outside the sample, which has {len(tokens.box)} visual tokens")
    here = (tokens.image == number) & np.isfinite(tokens.box).all(axis=1)
    if not here.any():
        raise DartLabError(f"picture {number} has no visual tokens with a place; give number= of one that has")
    longest = max(image.size)
    scale = _LONG_SIDE // longest if longest <= _LONG_SIDE else _LONG_SIDE / longest
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    resample = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    picture = np.asarray(image.convert("RGB").resize(size, resample))
    bright = np.zeros(picture.shape[:2], dtype=bool)
    for x0, y0, x1, y1 in np.rint(tokens.box[chosen[here[chosen]]] * scale).astype(int):
        bright[max(y0, 0) : y1, max(x0, 0) : x1] = True
    veiled = np.rint(picture * (1 - _VEIL) + _GREY * _VEIL).astype(np.uint8)
    out: Pixels = np.where(bright[..., None], picture, veiled)
    out[_outline(bright)] = _EDGE
    return out


def overlay_png(image: Image.Image, tokens: Tokens, kept: ArrayLike, *, number: int = 0) -> bytes:
    """The overlay as PNG, for a notebook; see `overlay_pixels`."""
    buffer = io.BytesIO()
    Image.fromarray(overlay_pixels(image, tokens, kept, number=number)).save(buffer, format="PNG", optimize=False)
    return buffer.getvalue()


def overlay(
    images: Sequence[Image.Image], samples: Sequence[Tokens], kept: Sequence[ArrayLike], titles: Sequence[str] = ()
) -> Figure:
    """Several overlays side by side, one a sample or one a method.

    Args:
        images: the pictures; samples: their visual tokens; kept: the kept indices of each. All of one length.
        titles: a line above each; default "64 of 576 kept".

    Raises:
        DartLabError: nothing to show, or lengths that differ.
    """
    if not images or len({len(images), len(samples), len(kept)}) > 1 or (titles and len(titles) != len(images)):
        raise DartLabError(
            f"{len(images)} images, {len(samples)} samples, {len(kept)} kept sets, {len(titles)} titles: numbers differ"
        )
    with house_style():
        figure = Figure(figsize=(2.6 * len(images), 2.9), layout="constrained")
        axes = figure.subplots(1, len(images), squeeze=False)[0]
        for i, ax in enumerate(axes):
            ax.imshow(overlay_pixels(images[i], samples[i], kept[i]), interpolation="nearest")
            ax.set_title(titles[i] if titles else f"{np.size(kept[i])} of {len(samples[i].box)} kept")
            ax.set_axis_off()
    return figure


def _outline(bright: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Veiled pixels that touch a bright one: the line lies outside the kept cells."""
    grown = bright.copy()
    grown[1:] |= bright[:-1]
    grown[:-1] |= bright[1:]
    grown[:, 1:] |= bright[:, :-1]
    grown[:, :-1] |= bright[:, 1:]
    return grown & ~bright
