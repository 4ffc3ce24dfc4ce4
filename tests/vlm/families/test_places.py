"""Every family, odd picture shapes: paint a picture under a token's box, and that token moves, and no distant one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.vlm import compat
from dart_lab.vlm.families import FAMILIES as ADAPTERS
from dart_lab.vlm.families import family_of
from dart_lab.vlm.families.minicpm import MINICPM
from dart_lab.vlm.layout import PATCH, VisualTokens
from dart_lab.vlm.locate import layout
from tests.vlm.families.anyres_models import picture
from tests.vlm.families.zoo import FAMILIES, VIDEO_LLAVA, VIDEOS, Zoo

SIZES = [(1, 1), (3, 60), (60, 3), (120, 6), (32, 32), (33, 32), (48, 16), (30, 20), (97, 61), (200, 150)]
PICTURED = [*FAMILIES, VIDEO_LLAVA]
PROBES = 14  # of a picture or frame
ENOUGH = 1000  # of all families and sizes together
FRAMES = 4
SEED = 7  # of the picture that is painted over
INNER = 0.4  # share of a box that is painted, in its middle
SUPPORT = 3  # pixels over which resizing spreads what is painted, on the smaller of the two scales


def without_mixing(model: Any) -> Any:
    """A copy in which nothing carries information from patch to patch in the vision tower."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if name.endswith(("out_proj", "attn.proj", "projection_layer")) and isinstance(module, nn.Linear):
            module.weight.data.zero_()
            module.bias.data.zero_()
    return model


def embeddings(kind: Zoo, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """`(n, channels)` of the visual tokens, as the text model receives them."""
    seen: list[Tensor] = []
    hook = compat.text_model(model).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0][0][family_of(model).visual_mask(model, inputs["input_ids"])[0]]


def shown(kind: Zoo, image: Image.Image) -> tuple[dict[str, Tensor], VisualTokens] | None:
    """A prompt about a picture and where its tokens lie; None for a shape that the image processor refuses."""
    try:
        inputs = kind.one_picture(image)
    except ValueError as error:
        assert "aspect ratio" in str(error), error
        return None
    return inputs, layout(kind.model("sdpa"), inputs, images=[image]).samples[0]


def probed(sample: VisualTokens) -> np.ndarray:
    """The tokens under whose boxes is painted, one after the other: some of the patches, or all where they are few."""
    patches = np.flatnonzero(sample.kind == PATCH)
    return np.random.default_rng(0).choice(patches, min(PROBES, len(patches)), replace=False)


def middle(box: np.ndarray, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The pixels in the middle of a box, one at least."""
    centre, half = (box[:2] + box[2:]) / 2, (box[2:] - box[:2]) * INNER / 2
    low = np.minimum(np.floor(centre - half), np.array(size) - 1).clip(min=0).astype(int)
    high = np.maximum(np.floor(centre + half).astype(int), low + 1)
    return int(low[0]), int(low[1]), int(high[0]), int(high[1])


def near(sample: VisualTokens, painted: tuple[int, ...], kind: Zoo, size: tuple[int, int]) -> np.ndarray:
    """Tokens whose box resizing may reach from the painted pixels; a box more where features are shrunk."""
    cell = sample.box[:, 2:] - sample.box[:, :2]
    steps = np.maximum(1, cell / kind.view_patch)
    if kind.through:  # the picture is resized twice on its way to the tiles, once more to the whole view
        sides = np.maximum(1, np.floor(np.array(size) * kind.through / max(size)))
        steps = steps + 2 * np.maximum(1, np.array(size) / sides)
    margin = SUPPORT * steps + kind.resampled * cell
    low, high = sample.box[:, :2] - margin, sample.box[:, 2:] + margin
    return ((low < painted[2:]) & (high > painted[:2])).all(axis=1) & (sample.kind == PATCH)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", PICTURED, ids=str)
def test_painting_under_a_box_moves_its_token_and_no_distant_one(kind: Zoo, size: tuple[int, int]) -> None:
    model = without_mixing(kind.model("sdpa"))
    image = picture(size, seed=SEED)
    found = shown(kind, image)
    if found is None:
        return
    inputs, sample = found
    boxes = sample.box[sample.kind == PATCH]
    assert (boxes >= 0).all() and (boxes[:, 2:] <= np.array(size)).all() and (boxes[:, 2:] >= boxes[:, :2]).all()
    assert np.isnan(sample.box[sample.kind != PATCH]).all()
    before = embeddings(kind, model, inputs)
    assert len(before) == len(sample)
    for token in probed(sample):
        painted = middle(sample.box[token], size)
        pixels = np.asarray(image).copy()
        region = pixels[painted[1] : painted[3], painted[0] : painted[2]]
        region[:] = np.where(region.mean() < 128, 255, 0)
        moved = (embeddings(kind, model, kind.one_picture(Image.fromarray(pixels))) != before).any(dim=1).numpy()
        inside = (sample.box[:, :2] <= painted[:2]).all(axis=1) & (sample.box[:, 2:] >= painted[2:]).all(axis=1)
        must = np.arange(len(sample)) == token if kind.resampled else inside | (np.arange(len(sample)) == token)
        assert moved[must].all(), (token, sample.box[token], painted)
        allowed = near(sample, painted, kind, size)
        assert not moved[~allowed].any(), (token, np.flatnonzero(moved & ~allowed))


def test_every_family_is_painted_and_all_of_them_often_enough() -> None:
    """Counted from the cases that the test above runs through, whatever process ran them."""
    paintings = dict.fromkeys(map(str, PICTURED), 0)
    for kind in PICTURED:
        for size in SIZES:
            found = shown(kind, picture(size, seed=SEED))
            paintings[str(kind)] += 0 if found is None else len(probed(found[1]))
    assert sum(paintings.values()) >= ENOUGH and all(paintings.values()), paintings
    painted = {family_of(kind.model("sdpa")).name for kind in PICTURED}
    assert painted | {MINICPM.name} == {adapter.name for adapter in ADAPTERS}, "MiniCPM-V's queries have no place"


@pytest.mark.parametrize("size", [(30, 20), (48, 16), (17, 40)], ids=str)
@pytest.mark.parametrize("kind", VIDEOS, ids=str)
def test_painting_in_a_frame_moves_the_tokens_of_that_frame_alone(kind: Zoo, size: tuple[int, int]) -> None:
    assert kind.one_video is not None
    model = without_mixing(kind.model("sdpa"))
    frames = [picture(size, seed=frame) for frame in range(FRAMES)]
    inputs = kind.one_video(frames)
    sample = layout(model, inputs, images=[frames[0]]).samples[0]
    before = embeddings(kind, model, inputs)
    assert len(before) == len(sample) and set(sample.frame) == set(range(FRAMES // kind.frames_a_step))
    assert not sample.image.any() and not sample.crop.any()
    for token in probed(sample):
        painted = middle(sample.box[token], size)
        for frame in range(FRAMES):
            pixels = np.asarray(frames[frame]).copy()
            region = pixels[painted[1] : painted[3], painted[0] : painted[2]]
            region[:] = np.where(region.mean() < 128, 255, 0)
            changed = [*frames[:frame], Image.fromarray(pixels), *frames[frame + 1 :]]
            moved = (embeddings(kind, model, kind.one_video(changed)) != before).any(dim=1).numpy()
            here = sample.frame == frame // kind.frames_a_step
            if here[token]:
                assert moved[token], (token, frame)
            allowed = near(sample, painted, kind, size) & here
            assert not moved[~allowed].any(), (token, frame, np.flatnonzero(moved & ~allowed))


@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_too_few_pictures_are_refused(kind: Zoo) -> None:
    inputs = kind.batch("padded")
    with pytest.raises(DartLabError, match=r"1 images were given, but the prompts hold \d"):
        layout(kind.model("sdpa"), inputs, [Image.new("RGB", (30, 20))])
