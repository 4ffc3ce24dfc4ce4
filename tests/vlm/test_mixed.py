"""A batch in which one prompt has a picture and another has none: each row as if it were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dart_lab as dl
from dart_lab.pruners.registry import make_pruner
from dart_lab.vlm.insert import prune
from tests.models import llava_model, llava_processor

WITHOUT_NUMBER = ("none-kept", "keep-all")
METHODS = (
    "dart", "fastv", "fastv-vis", "random", "uniform-grid", "divprune", "fastervlm", "visionzip", "pooling", "alpha",
    "window-fastv", *WITHOUT_NUMBER,
)


def prompt(processor: Any, *, picture: bool) -> str:
    parts = [{"type": "image"}] * picture + [{"type": "text", "text": "what shape is the red"}]
    return processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)


def test_layout_of_a_prompt_without_picture_is_empty() -> None:
    model, processor = llava_model(), llava_processor()
    inputs = processor(text=[prompt(processor, picture=False)], return_tensors="pt")
    tokens = dl.layout(model, inputs).samples[0]
    assert len(tokens) == 0 and tokens.box.shape == (0, 4)


@pytest.mark.parametrize("name", METHODS)
def test_rows_with_and_without_picture(name: str) -> None:
    model, processor = llava_model(layers=4, vision_layers=3), llava_processor()
    noise = np.random.default_rng(0).integers(0, 255, (84, 84, 3), dtype=np.uint8)
    with_picture, without = prompt(processor, picture=True), prompt(processor, picture=False)
    batch = processor(images=[Image.fromarray(noise)], text=[with_picture, without], return_tensors="pt", padding=True)
    pruner = make_pruner(name, **({} if name in WITHOUT_NUMBER else {"keep": 9}))
    with torch.no_grad():
        with prune(model, pruner) as run:
            both = model(**batch).logits[:, -1]
        with prune(model, pruner) as alone:
            first = model(**processor(images=[Image.fromarray(noise)], text=[with_picture], return_tensors="pt")).logits
        second = model(**processor(text=[without], return_tensors="pt")).logits
    assert run.got == [alone.got[0], 0]
    assert run.kept[0].tolist() == alone.kept[0].tolist()
    torch.testing.assert_close(both[0], first[0, -1], atol=1e-5, rtol=0)
    torch.testing.assert_close(both[1], second[0, -1], atol=1e-5, rtol=0)
