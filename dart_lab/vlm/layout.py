"""Where every position of a prompt belongs, and where every visual token lies on its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dart_lab.errors import DartLabError

PATCH, NEWLINE, CLS, QUERY = "patch", "newline", "cls", "query"
NO_PATCH, BLENDED = -1, -2
PADDING, BEFORE, VISUAL, AFTER = 0, 1, 2, 3
GROUPS = ("padding", "text before the image", "visual", "text after the image")


@dataclass(frozen=True, eq=False, kw_only=True)
class VisualTokens:
    """The visual tokens of one sample, one entry a token, in the order of the prompt.

    `position` in the prompt's sequence (padding included); `image`, `frame`, `crop` numbers from 0 (a video is one
    image, and `frame` counts its steps in time, each of which may show several frames of the file); `row`, `column` on
    the grid of that crop (-1 for tokens that lie on no grid); `kind` "patch", "newline", "cls" or "query" (one of a
    resampler, which attends to all of its crop); `box` `(n, 4)` pixels x0, y0, x1, y1 (NaN for tokens without a place).
    `patch`: number of the token's patch among those that the tower gives of its crop, -1 for a token that is none of
    them (a newline), -2 for one that is blended from several; None: a picture's tokens are all patches of its crops, in
    order.
    """

    position: np.ndarray
    image: np.ndarray
    frame: np.ndarray
    crop: np.ndarray
    row: np.ndarray
    column: np.ndarray
    kind: np.ndarray
    box: np.ndarray
    patch: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.position)

    @classmethod
    def join(cls, parts: Sequence[VisualTokens]) -> VisualTokens:
        """The tokens of several images, one after the other."""
        if not parts:
            return unknown_place(np.empty(0, dtype=np.int64))
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        joined: dict[str, Any] = {name: np.concatenate(x) for name, x in columns.items() if x[0] is not None}
        return cls(**joined)


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Layout of a batch.

    Attributes:
        group: `(batch, sequence)` int8: 0 padding, 1 text before the last visual token, 2 visual, 3 text after it.
        samples: the visual tokens of each sample.
    """

    group: np.ndarray
    samples: tuple[VisualTokens, ...]

    def grid(self, sample: int, image: int = 0, crop: int = 0) -> tuple[int, int]:
        """Rows and columns of one crop. Raises `DartLabError` if the sample has no such crop."""
        tokens = self.samples[sample]
        here = (tokens.image == image) & (tokens.crop == crop) & (tokens.row >= 0)
        if not here.any():
            raise DartLabError(f"sample {sample} has no image {image} with crop {crop}")
        return int(tokens.row[here].max()) + 1, int(tokens.column[here].max()) + 1

    def grid_index(self) -> np.ndarray:
        """`(batch, n, 4)` int64: image, crop, row, column of every visual token, -1 after a shorter sample's end.

        A frame of a video counts as a crop, so that budgets per crop are budgets per frame.
        """
        width = max((len(tokens) for tokens in self.samples), default=0)
        out = np.full((len(self.samples), width, 4), -1, dtype=np.int64)
        for i, tokens in enumerate(self.samples):
            view = tokens.crop + tokens.frame
            out[i, : len(tokens)] = np.stack([tokens.image, view, tokens.row, tokens.column], axis=1)
        return out


def groups(visual: np.ndarray, attended: np.ndarray) -> np.ndarray:
    """Group of every position from two `(batch, sequence)` bool masks: visual tokens, and real tokens."""
    last = np.where(visual.any(axis=1), visual.shape[1] - 1 - visual[:, ::-1].argmax(axis=1), -1)
    after = np.arange(visual.shape[1]) > last[:, None]
    group = np.where(visual, VISUAL, np.where(after & visual.any(axis=1, keepdims=True), AFTER, BEFORE))
    return np.where(attended, group, PADDING).astype(np.int8)


def raster(rows: int, columns: int, width: float, height: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, column and pixel box `(rows·columns, 4)` of a grid laid over `width` × `height` pixels, row by row."""
    row, column = (part.ravel() for part in np.mgrid[:rows, :columns])
    unit = np.array([width / columns, height / rows] * 2)
    return row, column, np.stack([column, row, column + 1, row + 1], axis=1) * unit


def unknown_place(position: np.ndarray) -> VisualTokens:
    """Visual tokens of which only the position is known (callers that bring their own embeddings)."""
    n = len(position)
    zero, nowhere = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    return VisualTokens(
        position=position.astype(np.int64),
        image=zero,
        frame=zero,
        crop=zero,
        row=nowhere,
        column=nowhere,
        kind=np.full(n, PATCH),
        box=np.full((n, 4), np.nan),
    )
