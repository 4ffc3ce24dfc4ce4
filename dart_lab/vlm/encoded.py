"""What the vision towers were given: all of a prompt, which rows are whose picture, fingerprints, a look at one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DIGEST = 7  # bytes of a fingerprint
_PICTURES_DIM = 4  # of a tower input that holds pictures, not loose patches


class Encoded:
    """The pictures of a prompt and, after them, its videos, as the towers received them.

    `pixels` `(rows, …)`: what came for the last prompt that had any, or fingerprints where it fits into no tensor.
    """

    def __init__(self) -> None:
        self.pixels: Tensor | None = None
        self._complete = True
        self._in_views = False

    def expect(self) -> None:
        """What comes next belongs to another prompt."""
        self._complete, self._in_views = True, False

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of a tower: keep what it encodes, behind what came before it for the same prompt."""
        if self._in_views:  # of which the tower gets a few at a time, padded
            return
        new = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        known = None if self._complete else self.pixels
        if new is not None and known is not None and new.shape[1:] == known.shape[1:]:
            new = torch.cat([known, new])
        self.pixels, self._complete = new, False

    def note_views(self, views: Sequence[Tensor]) -> None:
        """Keep fingerprints `(views, bytes)` of pictures of any size, and look away while the tower gets them."""
        self._in_views = True
        each = [list(hashlib.blake2b(_bytes(view), digest_size=DIGEST).digest()) for view in views]
        self.pixels = torch.tensor(each, dtype=torch.uint8) if each else None

    def rows(self, each: Sequence[int], are_videos: Sequence[bool]) -> list[range]:
        """Rows of each picture or video, in the order of the prompts; empty if that cannot be told.

        Args:
            each: how many rows each one has, in the order of the prompts.
            are_videos: which of them are videos; all pictures are encoded first.
        """
        if self.pixels is None or len(each) != len(are_videos) or not sum(each) or len(self.pixels) % sum(each):
            return []
        repeat = len(self.pixels) // sum(each)  # beams encode a picture once each
        own, starts = np.array(each), np.empty(len(each), dtype=np.int64)
        order = np.argsort(are_videos, kind="stable")
        starts[order] = (np.cumsum(own[order]) - own[order]) * repeat
        return [range(int(start), int(start) + one) for start, one in zip(starts, each, strict=True)]

    def view(self, row: int) -> np.ndarray | None:
        """One row as a picture, see `as_picture`; None where rows are no pictures."""
        if self.pixels is None or self.pixels.dim() != _PICTURES_DIM:
            return None
        return as_picture(self.pixels[row])

    def content(self, rows: range) -> bytes:
        """The bytes of some rows, in float32."""
        return b"" if self.pixels is None else _bytes(self.pixels[rows.start : rows.stop])


def _bytes(pixels: Tensor) -> bytes:
    return np.ascontiguousarray(pixels.detach().float().cpu().numpy()).tobytes()


def as_picture(pixels: Tensor) -> np.ndarray:
    """One row of the tower's input, `(3, height, width)`, as `(height, width, 3)` uint8 over its own range."""
    values = pixels.detach().float().cpu()
    low, high = values.amin(), values.amax()
    scaled = (values - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    return (scaled * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
