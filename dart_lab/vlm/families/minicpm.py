"""MiniCPM-V 2.6, whose code comes with its checkpoint: a resampler turns every view of a picture into a few queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.vlm.families.tiles import CUT, rows_by_crops, runs
from dart_lab.vlm.layout import QUERY, VisualTokens

_MARK = -1  # no token has this id
_TAGS = 2  # tokens between two views in one row: the end of the one, the begin of the other


@dataclass(frozen=True)
class MiniCPM:
    """Adapter for the class `MiniCPMV` of MiniCPM-V 2.6: `llm` a Qwen2, `vpm` a SigLIP, `resampler` its queries.

    Crop 0 of a picture is the whole of it, crops 1, 2 … its slices, row by row. A query attends to all of its crop, so
    that it has no row, no column and no box. The prompt's placeholders have an id that no config names: `image_bound`,
    which the processor returns, says where they are. A picture begins with the tag in front of the prompt's first one,
    `<image>`; slices have another, `<slice>`. Frames of a video count as pictures.
    """

    name: str = "minicpm-v"
    model_types: tuple[str, ...] = ("minicpmv",)
    prompt: str = "<|im_start|>user\n<image>\n{question}<|im_end|>\n<|im_start|>assistant\n"
    placeholder: str = "(<image>./</image>)"
    whole: int = 0

    def visual_mask(self, model: Any, input_ids: Tensor) -> Tensor:
        return input_ids == _MARK

    def tokens(
        self,
        model: Any,
        ids: np.ndarray,
        position: np.ndarray,
        inputs: Mapping[str, Any],
        first_image: int,
        sizes: Sequence[tuple[int, int]] | None,
    ) -> tuple[VisualTokens, int]:
        crops, queries = runs(position), int(model.config.query_num)
        odd = [len(crop) for crop in crops if len(crop) != queries]
        if odd:
            raise DartLabError(f"a view of a picture has {odd[0]} tokens instead of {queries}: {CUT}")
        if position[0] == 0:
            raise DartLabError(f"the prompt begins inside a picture, without the tag in front of it: {CUT}")
        tags = np.array([ids[crop[0] - 1] for crop in crops])
        begins = tags == tags[0]
        gaps = np.array([after[0] - before[-1] - 1 for before, after in pairwise(crops)])
        if (begins[1:] & (gaps == _TAGS)).any():
            raise DartLabError(
                "two pictures with nothing between their tags, as MiniCPM-V 2.5 writes the slices of one; only 2.6 is "
                "supported: write pictures on lines of their own"
            )
        image = np.cumsum(begins) - 1
        crop = np.arange(len(crops)) - np.flatnonzero(begins)[image]
        nowhere = np.full(len(position), -1, dtype=np.int64)
        tokens = VisualTokens(
            position=position.astype(np.int64), image=image.repeat(queries), frame=np.zeros_like(nowhere),
            crop=crop.repeat(queries), row=nowhere, column=nowhere, kind=np.full(len(position), QUERY),
            box=np.full((len(position), 4), np.nan),
        )  # fmt: skip
        return tokens, int(begins.sum())

    def pixel_rows(self, model: Any, inputs: Mapping[str, Any], samples: Sequence[VisualTokens]) -> list[int] | None:
        return rows_by_crops(samples)

    def regions(self, model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray] | None:
        return None


def marked_ids(inputs: Mapping[str, Any]) -> Tensor:
    """Token ids `(batch, sequence)`, with -1 between the bounds of pictures; as they are where no bounds are given.

    Args:
        inputs: `input_ids`, and for each row of them `image_bound` `(crops, 2)`: first position and the one behind the
            last.

    >>> marked_ids({"input_ids": torch.tensor([[7, 8, 8, 9]]), "image_bound": [torch.tensor([[1, 3]])]}).tolist()
    [[7, -1, -1, 9]]
    """
    ids: Tensor = inputs["input_ids"]
    bounds = inputs.get("image_bound")
    if bounds is None:
        return ids
    if len(bounds) != len(ids):
        raise DartLabError(
            f"image_bound has {len(bounds)} entries for {len(ids)} prompts; pass what the processor returned"
        )
    ids = ids.clone()
    for row, own in zip(ids, bounds, strict=True):
        for start, end in torch.as_tensor(own).reshape(-1, 2).tolist():
            row[int(start) : int(end)] = _MARK
    return ids


MINICPM = MiniCPM()
