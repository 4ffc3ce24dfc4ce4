"""A run shows itself in a notebook: the kept tokens over the pictures that the model saw."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from dart_lab.pruners import UniformGrid
from dart_lab.vlm.encoded import as_picture
from dart_lab.vlm.insert import prune
from dart_lab.vlm.passes import PICTURES_SHOWN
from dart_lab.vlm.select import select
from tests.vlm.common import batch, small_llava


def test_a_row_of_pixels_becomes_a_picture_of_its_own_range() -> None:
    pixels = torch.zeros(3, 2, 2)
    pixels[0, 0, 1], pixels[2, 1, 0] = -1.0, 3.0
    picture = as_picture(pixels)
    assert picture.shape == (2, 2, 3) and picture.dtype == np.uint8
    assert picture[0, 1].tolist() == [0, 64, 64]
    assert picture[1, 0].tolist() == [64, 64, 255]
    assert as_picture(torch.ones(3, 2, 2)).max() == 0  # nothing to see, and no division by zero


def test_the_first_pictures_are_noted_and_shown() -> None:
    model, inputs = small_llava(), batch((1,) * (PICTURES_SHOWN + 1))
    with torch.no_grad(), prune(model, UniformGrid(keep=4)) as run:
        model(**inputs)
    views = [sample.view for sample in run.samples]
    assert [view is not None for view in views] == [True] * PICTURES_SHOWN + [False]
    for row, view in enumerate(views[:PICTURES_SHOWN]):
        assert np.array_equal(view, as_picture(inputs["pixel_values"][row]))
    shown = Image.open(io.BytesIO(run._repr_png_()))
    assert shown.width > 2 * shown.height  # side by side


def test_select_shows_the_same_pictures() -> None:
    model, inputs = small_llava(), batch((1, 1))
    runs = select(model, inputs, [UniformGrid(keep=4), UniformGrid(keep=8)])
    assert all(sample.view is not None for run in runs for sample in run.samples)
    assert runs[0]._repr_png_() != runs[1]._repr_png_()


def test_without_a_picture_there_is_nothing_to_show() -> None:
    model, inputs = small_llava(), batch((1,))
    seen = model.get_input_embeddings()(inputs["input_ids"])
    visual = torch.zeros(seen.shape[:2], dtype=torch.bool)
    visual[:, 3:11] = True
    with torch.no_grad(), prune(model, UniformGrid(keep=4), visual=visual) as run:
        model(inputs_embeds=seen, attention_mask=inputs["attention_mask"])
    assert run._repr_png_() is None
