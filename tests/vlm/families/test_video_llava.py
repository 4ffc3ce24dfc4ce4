"""Video-LLaVA: class tokens are marked, videos and pictures keep their order, and what cannot be right is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners import DivPrune, FasterVLM
from dart_lab.vlm.insert import prune
from dart_lab.vlm.layout import CLS, PATCH
from dart_lab.vlm.locate import layout
from tests.vlm.families.anyres_models import picture
from tests.vlm.families.test_fronts import embeddings
from tests.vlm.families.test_places import without_mixing
from tests.vlm.families.video_llava_models import (
    FILM,
    FRAMES,
    PATCHES,
    PICTURE,
    video_llava_batch,
    video_llava_model,
)


def test_every_frame_of_a_video_begins_with_a_class_token() -> None:
    model, inputs = video_llava_model(), video_llava_batch([(PICTURE, FILM), (FILM,)])
    first, second = layout(model, inputs).samples
    assert len(first) == PATCHES + FRAMES * (PATCHES + 1) and len(second) == FRAMES * (PATCHES + 1)
    assert first.image.tolist() == [0] * PATCHES + [1] * len(second)
    assert second.frame.tolist() == np.arange(FRAMES).repeat(PATCHES + 1).tolist()
    for sample, start in ((first, PATCHES), (second, 0)):
        classes = np.arange(start, len(sample), PATCHES + 1)
        assert np.flatnonzero(sample.kind == CLS).tolist() == classes.tolist()
        assert (sample.row[classes] == -1).all() and np.isnan(sample.box[classes]).all()
        assert (np.delete(sample.kind, classes) == PATCH).all()


def test_the_tokens_marked_as_class_tokens_are_the_towers() -> None:
    """Where nothing goes from patch to patch, every patch of a changed frame moves, and its class token does not."""
    model, inputs = without_mixing(video_llava_model()), video_llava_batch([(FILM,)])
    sample = layout(model, inputs).samples[0]
    changed = inputs["pixel_values_videos"].clone()
    changed[0, 1] += 1
    before, after = (embeddings(model, {**inputs, "pixel_values_videos": x})[0, sample.position] for x in (
        inputs["pixel_values_videos"], changed,
    ))  # fmt: skip
    moved = (before != after).any(dim=1).numpy()
    assert moved.tolist() == ((sample.frame == 1) & (sample.kind != CLS)).tolist()


def test_boxes_are_those_of_the_crop_in_the_middle() -> None:
    original = picture((60, 40))
    sample = layout(video_llava_model(), video_llava_batch([(FILM,)]), images=[original]).samples[0]
    assert sample.box[1].tolist() == [10, 0, 20, 10] and sample.box[PATCHES].tolist() == [40, 30, 50, 40]


def test_what_cannot_be_right_is_refused() -> None:
    model, inputs = video_llava_model(), video_llava_batch([(FILM,)])
    with pytest.raises(DartLabError, match="videos but no pixel_values_videos"):
        layout(model, {"input_ids": inputs["input_ids"]})
    with pytest.raises(DartLabError, match="cuts an image"):
        layout(model, {**inputs, "input_ids": inputs["input_ids"][:, :20]})
    for pruner in (FasterVLM(keep=5), DivPrune(keep=5, where="PROJECTED")):
        with pytest.raises(DartLabError, match="one vision tower for pictures and one"), prune(model, pruner):
            pass
    with torch.no_grad(), prune(model, DivPrune(keep=5)) as run:
        model(**inputs)
    assert run.got == [5]
