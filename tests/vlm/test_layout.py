"""Where LLaVA's visual tokens lie, proven by changing pixels and watching which embeddings move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, UniformGrid
from dart_lab.vlm.insert import prune
from dart_lab.vlm.locate import layout
from tests.models import PATCH, llava_processor
from tests.vlm.common import GRID, IMAGE, THREE, TOKENS, batch, pad, small_llava, words

VIEW = GRID * PATCH


def without_mixing(model: Any) -> Any:
    """Switch off all that carries information from patch to patch in the vision tower."""
    with torch.no_grad():
        for name, parameter in model.model.vision_tower.named_parameters():
            if "self_attn.out_proj" in name:
                parameter.zero_()
    return model


def embeddings(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """`(batch, sequence, channels)` as the text model receives them."""
    seen: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0]


def moved(model: Any, inputs: dict[str, Tensor], pixels: Tensor) -> list[list[int]]:
    """Positions of each row whose embedding changes if the pixels are these."""
    before, after = embeddings(model, inputs), embeddings(model, {**inputs, "pixel_values": pixels})
    return [row.nonzero()[:, 0].tolist() for row in (before != after).any(dim=2)]


def test_every_token_sees_its_own_box_and_no_other() -> None:
    model, inputs = without_mixing(small_llava()), batch(THREE)
    samples = layout(model, inputs).samples
    assert [len(sample) for sample in samples] == [TOKENS, 2 * TOKENS, TOKENS]
    picture = 0
    for row, sample in enumerate(samples):
        for image in range(THREE[row]):
            for token in np.flatnonzero(sample.image == image):
                x0, y0, x1, y1 = sample.box[token].astype(int)
                assert (x0 // PATCH, y0 // PATCH) == (sample.column[token], sample.row[token])
                pixels = inputs["pixel_values"].clone()
                pixels[picture, :, y0:y1, x0:x1] += 1
                want: list[list[int]] = [[] for _ in THREE]
                want[row] = [int(sample.position[token])]
                assert moved(model, inputs, pixels) == want
            picture += 1


def test_groups_and_grid() -> None:
    inputs = batch(THREE)
    found = layout(small_llava(), inputs)
    ids, mask = inputs["input_ids"].numpy(), inputs["attention_mask"].numpy().astype(bool)
    assert ((found.group == 0) == ~mask).all()
    assert ((found.group == 2) == (ids == IMAGE)).all()
    for row, sample in enumerate(found.samples):
        after = np.arange(ids.shape[1]) > sample.position.max()
        assert (found.group[row] == 3).tolist() == after.tolist()
    assert found.grid(1, image=1) == (GRID, GRID)
    with pytest.raises(DartLabError, match="no image 2"):
        found.grid(1, image=2)


def test_the_class_token_comes_first_and_lies_nowhere() -> None:
    model = without_mixing(small_llava())
    model.config.vision_feature_select_strategy = "full"
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randn(2, 3, VIEW, VIEW, generator=generator)
    inputs = pad([[1, *[IMAGE] * (2 * (TOKENS + 1)), *words(generator, 4)]], pictures)
    sample = layout(model, inputs).samples[0]
    assert sample.kind.tolist() == (["cls"] + ["patch"] * TOKENS) * 2
    first = sample.kind == "cls"
    assert (sample.row[first] == -1).all() and np.isnan(sample.box[first]).all()
    for token in np.flatnonzero(~first)[[0, 5, TOKENS, TOKENS + 7]]:
        x0, y0, x1, y1 = sample.box[token].astype(int)
        pixels = inputs["pixel_values"].clone()
        pixels[sample.image[token], :, y0:y1, x0:x1] += 1
        assert moved(model, inputs, pixels) == [[int(sample.position[token])]]
    with prune(model, UniformGrid(keep=8)) as run, torch.no_grad():
        model(**inputs)
    assert (run.table().query("kept").kind == "patch").all()  # tokens off the grid come last


@pytest.mark.parametrize("size", [(200, 112), (112, 200), (300, 90), (56, 56), (31, 77)])
def test_boxes_in_the_original_picture(size: tuple[int, int]) -> None:
    """A patch painted into the original picture inside a token's box moves that token; outside all boxes, none."""
    model, processor = without_mixing(small_llava()), llava_processor(grid=GRID)
    grey = Image.new("RGB", size, (90, 90, 90))

    def prepared(picture: Image.Image) -> Any:
        return processor(images=[picture], text=["<bos> user : <image> what ? assistant :"], return_tensors="pt")

    inputs = prepared(grey)
    sample = layout(model, inputs, images=[grey]).samples[0]
    assert sample.box[:, :2].min() >= -0.5 and (sample.box[:, 2:].max(axis=0) <= np.array(size) + 0.5).all()
    for token in (0, GRID - 1, 6, TOKENS - 1):
        x0, y0, x1, y1 = sample.box[token]
        inner = [round(x0 + 0.35 * (x1 - x0)), round(y0 + 0.35 * (y1 - y0)), 0, 0]
        inner[2], inner[3] = inner[0] + max(1, int(0.3 * (x1 - x0))), inner[1] + max(1, int(0.3 * (y1 - y0)))
        painted = grey.copy()
        painted.paste((250, 20, 20), inner)
        assert moved(model, inputs, prepared(painted)["pixel_values"]) == [[int(sample.position[token])]]
    left, top = sample.box[:, 0].min(), sample.box[:, 1].min()
    if max(left, top) > 8:  # what the centre crop cuts away
        painted = grey.copy()
        painted.paste((250, 20, 20), (0, 0, *((int(left) - 6, size[1]) if left > top else (size[0], int(top) - 6))))
        assert moved(model, inputs, prepared(painted)["pixel_values"]) == [[]]


def test_the_table_says_what_stayed_and_where() -> None:
    model, inputs = small_llava(), batch(THREE)
    with prune(model, DART(keep=0.25, layer=1, seed=3)) as run, torch.no_grad():
        model(**inputs)
    table = run.table()
    assert len(table) == 4 * TOKENS
    for row, kept in enumerate(run.kept):
        own = table[table["sample"] == row]
        assert kept.dtype == np.int64 and own.token[own.kept].tolist() == kept.tolist()
        assert own.position[own.kept].tolist() == run.positions[row].tolist()
        assert (inputs["input_ids"][row, run.positions[row]] == IMAGE).all()
        assert (own.order >= 0).tolist() == own.kept.tolist()
        assert sorted(own.order[own.kept]) == list(range(len(kept)))
        assert set(own.asked) == {run.asked[row]} and set(own.got) == {run.got[row]} == {len(kept)}
    assert set(table.method) == {"dart"} and set(table.layer) == {1} and set(table.stage) == {"LLM_LAYER"}
    assert table.score.dtype == np.float32 and table.score.notna().all()
    assert (table.token == table.image * TOKENS + table.row * GRID + table.column).all()
