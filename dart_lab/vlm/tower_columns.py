"""`TowerColumns`: how much attention each patch gets inside the vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dart_lab.vlm import compat
from dart_lab.vlm.families.tiles import folded, tokens_of_tile
from dart_lab.vlm.providers import received
from dart_lab.vlm.tap import Captured, Tap


class TowerColumns:
    """While active, sum the columns of attention in the block that makes the features.

    Towers of which no single block makes the features, or whose patches are merged behind it, are not looked at.

    Args:
        model: a Hugging Face model object.
    """

    def __init__(self, model: Any) -> None:
        tower, feature = compat.vision_tower(model), getattr(model.config, "vision_feature_layer", None)
        self._tap: Tap | None = None
        self._rows: list[Tensor] = []
        if tower is not None and isinstance(feature, int) and folded(model.config) == 1:
            blocks = compat.vision_blocks(tower)
            index = len(blocks) + feature if feature < 0 else feature - 1
            self._places = tokens_of_tile(model.config)
            self._tap = Tap({index: blocks[index]}, self._look)

    def __enter__(self) -> TowerColumns:
        self._rows.clear()
        if self._tap is not None:
            self._tap.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._tap is not None:
            self._tap.__exit__()

    def sums(self, counts: Sequence[int]) -> list[Tensor] | None:
        """For each sample `(n,)` float32 what its patches got, given how many it has; None where that cannot be told.

        The class token and registers in front of the patches are queries, but no columns of the result.
        """
        parts = [rows[:, rows.shape[1] - self._places :].reshape(-1) for rows in self._rows]
        if sum(map(len, parts)) != sum(counts):
            return None
        return list(torch.cat(parts).split(list(counts)))

    def _look(self, index: int, captured: Captured) -> None:
        every = torch.ones(captured.query.shape[0], captured.query.shape[2], dtype=torch.bool,
                           device=captured.query.device)  # fmt: skip
        self._rows.append(received(captured, every, 0))
