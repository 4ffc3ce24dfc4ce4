"""LLaVA-OneVision's videos: pooled patches, one newline at the end, and what a decision about patches cannot mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners import DivPrune
from dart_lab.vlm.insert import prune
from dart_lab.vlm.layout import NEWLINE, PATCH
from dart_lab.vlm.locate import layout
from tests.vlm.families.anyres_models import FRAMES, POOLED, VIDEO, anyres_model, video_batch
from tests.vlm.families.anyres_models import PATCH as PIXELS
from tests.vlm.families.test_fronts import embeddings
from tests.vlm.families.test_places import without_mixing

ODD = 5  # patches a side, pooled to 3


def test_a_video_ends_in_a_newline() -> None:
    inputs = video_batch([((30, 20), None), (None, (7, 60))])
    first, second = layout(anyres_model("llava_onevision"), inputs).samples
    for sample, image in ((first, 1), (second, 0)):
        film = sample.image == image
        assert film.sum() == FRAMES * POOLED + 1
        assert sample.kind[film].tolist() == [PATCH] * FRAMES * POOLED + [NEWLINE]
        assert sample.frame[film].tolist() == [*np.arange(FRAMES).repeat(POOLED), FRAMES - 1]
        assert sample.row[film][-1] == -1 and np.isnan(sample.box[film][-1]).all()
        assert not sample.frame[~film].any(), "pictures have one frame"


def test_the_newline_is_the_models() -> None:
    model, inputs = anyres_model("llava_onevision"), video_batch([(None,)])
    sample = layout(model, inputs).samples[0]
    same = (embeddings(model, inputs)[0, sample.position] == model.model.image_newline).all(dim=1)
    assert np.array_equal(same.numpy(), sample.kind == NEWLINE)


def test_tokens_lie_over_their_pixels_where_patches_are_odd() -> None:
    """Five patches a side become three tokens: each moves with the pixels in the middle of its box."""
    view = ODD * PIXELS
    model = without_mixing(anyres_model("llava_onevision", view=view))
    side = -(-ODD // 2)
    pixels = torch.randn(1, FRAMES, 3, view, view, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, *[VIDEO] * (FRAMES * side * side + 1), 2]])
    inputs = {"input_ids": ids, "pixel_values_videos": pixels}
    sample = layout(model, inputs).samples[0]
    before = embeddings(model, inputs)[0, sample.position]
    for token in np.flatnonzero(sample.kind == PATCH):
        x, y = (int(c) for c in (sample.box[token, :2] + sample.box[token, 2:]) / 2)
        changed = pixels.clone()
        changed[0, sample.frame[token], :, y, x] += 1
        after = embeddings(model, {**inputs, "pixel_values_videos": changed})[0, sample.position]
        moved = np.flatnonzero((before != after).any(dim=1).numpy())
        assert token in moved and set(sample.frame[moved]) == {sample.frame[token]}
        assert abs(sample.row[moved] - sample.row[token]).max() <= 1
        assert abs(sample.column[moved] - sample.column[token]).max() <= 1


def test_what_cannot_be_right_is_refused() -> None:
    model = anyres_model("llava_onevision")
    for prompt, reason in (((None,), "shrinks this picture or video"), ((None, (30, 20)), "do not belong")):
        inputs = video_batch([prompt])
        pruner = DivPrune(keep=5, where="PROJECTED")
        with pytest.raises(DartLabError, match=reason), prune(model, pruner), torch.no_grad():
            model(**inputs)
        with torch.no_grad(), prune(model, DivPrune(keep=5)) as run:
            model(**inputs)
        assert run.got == [5]
    inputs = video_batch([(None,)])
    with pytest.raises(DartLabError, match="videos but no pixel_values_videos"):
        layout(model, {"input_ids": inputs["input_ids"]})
    with pytest.raises(DartLabError, match="cuts an image"):
        layout(model, {**inputs, "input_ids": inputs["input_ids"][:, :10]})
