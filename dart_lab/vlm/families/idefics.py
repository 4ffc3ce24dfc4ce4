"""Idefics3 and SmolVLM: the picture stretched over a grid of tiles with text tags between them, the whole one last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm.families.base import image_token
from dart_lab.vlm.families.tiles import CUT, check_whole_tiles, one, rows_by_crops, runs, side_of, tiled
from dart_lab.vlm.layout import VisualTokens

_TAG = 2  # tokens in front of a tile within a row: a fake token around images, and the tile's tag


@dataclass(frozen=True)
class Idefics:
    """Adapter for `Idefics3ForConditionalGeneration` and `SmolVLMForConditionalGeneration`; frames count as pictures.

    The processor announces each tile by two tokens, `<fake_token_around_image><row_1_col_1>`, begins every row of
    tiles but the first with a line break, and closes a picture with the whole of it, announced by `<global-img>`. Which
    ids these are, no config says; but a prompt's last tile is a whole picture.
    """

    name: str = "idefics3"
    model_types: tuple[str, ...] = ("idefics3", "smolvlm")
    prompt: str = "<image>\n{question}"
    whole: int = -1

    def visual_mask(self, model: Any, input_ids: Tensor) -> Tensor:
        return input_ids == image_token(model.config)

    def tokens(
        self,
        model: Any,
        ids: np.ndarray,
        position: np.ndarray,
        inputs: Mapping[str, Any],
        first_image: int,
        sizes: Sequence[tuple[int, int]] | None,
    ) -> tuple[VisualTokens, int]:
        side, view = side_of(model.config), one(model.config.vision_config.image_size)
        tiles = runs(position)
        for tile in tiles:
            check_whole_tiles(tile, side * side)
        if any(len(tile) != side * side for tile in tiles):
            raise DartLabError(
                "two pictures with no token between them, where the processor writes a tag before each tile: it is "
                "not known which tiles make up a picture; keep the processor's tags"
            )
        parts = []
        for image, picture in enumerate(_pictures(ids, tiles)):
            known = sizes is not None and first_image + image < len(sizes)
            size = sizes[first_image + image] if sizes is not None and known else (view, view)
            parts.append(tiled(np.concatenate(picture), image, side, _grid(picture), size))
        return VisualTokens.join(parts), len(parts)

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        return rows_by_crops(samples)

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        return None


def _pictures(ids: np.ndarray, tiles: list[np.ndarray]) -> list[list[np.ndarray]]:
    """The tiles of each picture: up to and with the one that has the same tag as the last tile of all."""
    end = int(tiles[-1][-1]) + 1
    if end == len(ids):
        raise DartLabError(f"the prompt ends in a tile, without the token that closes a picture: {CUT}")
    fake = ids[end]
    if any(tile[0] < _TAG or ids[tile[0] - _TAG] != fake for tile in tiles):
        raise DartLabError(
            "a tile without the processor's tag in front of it, <fake_token_around_image> and one more token: it is "
            "not known which tiles make up a picture; keep the processor's tags"
        )
    tags = np.array([ids[tile[0] - 1] for tile in tiles])
    ends = np.flatnonzero(tags == tags[-1]) + 1
    return [tiles[start:stop] for start, stop in zip([0, *ends[:-1]], ends, strict=True)]


def _grid(picture: list[np.ndarray]) -> tuple[int, int]:
    """Tiles down and across, (0, 0) for a picture shown whole only."""
    tiles = picture[:-1]
    breaks = [i for i in range(1, len(tiles)) if tiles[i][0] - tiles[i - 1][-1] - 1 > _TAG]
    widths = {len(row) for row in np.split(np.arange(len(tiles)), breaks)}
    if len(tiles) == 1 or len(widths) > 1:
        raise DartLabError(f"the tiles of a picture do not make up whole rows: {CUT}")
    return (len(breaks) + 1, widths.pop()) if tiles else (0, 0)


IDEFICS = Idefics()
