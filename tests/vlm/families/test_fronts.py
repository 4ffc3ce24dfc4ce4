"""Stages in front of the language model on models with tiles: as if the short prompt had been fed, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners import DivPrune, FasterVLM, HiRED, ToMe, VisionZip
from dart_lab.vlm import compat
from dart_lab.vlm.families import family_of
from dart_lab.vlm.insert import prune
from dart_lab.vlm.layout import NEWLINE
from dart_lab.vlm.locate import layout
from tests.vlm.families.test_every_family import answer
from tests.vlm.families.zoo import FAMILIES, Zoo

NAMES = ("llava", "llava_next", "llava_onevision", "qwen2_vl")
LLAVA, NEXT, ONEVISION, QWEN = (next(kind for kind in FAMILIES if str(kind) == name) for name in NAMES)
PATCHES = 16  # of a crop
DROPPING = [DivPrune(keep=7), DivPrune(keep=5, where="PROJECTED"), FasterVLM(keep=5), HiRED(keep=5)]


def embeddings(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the language model receives for a prompt, pictures in place: `(batch, sequence, channels)`."""
    seen: dict[str, Tensor] = {}
    text = compat.text_model(model)
    hook = text.register_forward_pre_hook(lambda _, __, k: seen.update(e=k["inputs_embeds"]), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen["e"]


@pytest.mark.parametrize("kind", [LLAVA, NEXT], ids=str)
@pytest.mark.parametrize("prompts", ["one", "padded"])
@pytest.mark.parametrize("pruner", DROPPING, ids=lambda p: f"{p.name}-{p.stage.kind}")
def test_dropping_equals_feeding_the_short_prompt(kind: Zoo, pruner: Any, prompts: str) -> None:
    model, inputs = kind.model("sdpa"), kind.batch(prompts)
    full = embeddings(model, inputs)
    with prune(model, pruner) as run:
        _, logits = answer(kind, model, inputs)
    for row, sample in enumerate(layout(model, inputs).samples):
        stays = ~torch.isin(inputs["input_ids"][row], torch.tensor(kind.visual)) & inputs["attention_mask"][row].bool()
        stays[torch.from_numpy(run.positions[row])] = True
        short = full[row : row + 1, stays]
        _, alone = answer(
            kind, model, {"inputs_embeds": short, "attention_mask": torch.ones(short.shape[:2], dtype=torch.long)}
        )
        torch.testing.assert_close(logits[:, row], alone[:, 0], atol=1e-5, rtol=0)
        newlines, kept = np.flatnonzero(sample.kind == NEWLINE), run.kept[row]
        if pruner.stage.kind == "LLM_IN":
            assert run.got[row] == len(kept) == pruner.keep
            continue
        assert np.isin(newlines, kept).all(), "no patch becomes a newline, and no method drops it"
        crops = len(set(zip(sample.image.tolist(), sample.crop.tolist(), strict=True)))
        assert run.asked[row] == crops * pruner.keep + len(newlines)
        assert len(kept) == run.got[row] <= run.asked[row], "what unpadding takes away is in no prompt"


def test_a_crop_keeps_what_its_own_ranking_says() -> None:
    """FasterVLM's ranking, by the attention of the crop's class token, redone from the tower alone."""
    model, inputs = NEXT.model("eager"), NEXT.batch("one")
    with torch.no_grad(), prune(model, FasterVLM(keep=5)) as run:
        model(**inputs)
    with torch.no_grad():
        pixels = inputs["pixel_values"][0]
        maps = model.model.vision_tower(pixels, output_attentions=True).attentions[model.config.vision_feature_layer]
    best = maps.mean(dim=1)[:, 0, 1:].topk(5, dim=1).indices
    sample = layout(model, inputs).samples[0]
    assert sample.patch is not None
    want = [
        token for token in range(len(sample))
        if sample.kind[token] == NEWLINE or sample.patch[token] in best[sample.crop[token]].tolist()
    ]  # fmt: skip
    assert run.kept[0].tolist() == want


@pytest.mark.parametrize("pruner", [VisionZip(keep=6), ToMe(keep=8, blocks=1)], ids=lambda p: p.name)
@pytest.mark.parametrize("prompts", ["one", "padded"])
def test_merging_is_the_same_in_a_batch_and_keeps_its_provenance(pruner: Any, prompts: str) -> None:
    model, inputs = NEXT.model("sdpa"), NEXT.batch(prompts)
    with prune(model, pruner) as run:
        _, logits = answer(NEXT, model, inputs)
    for row, sample in enumerate(layout(model, inputs).samples):
        made_of = run.samples[row].patches()
        assert made_of.shape == (len(run.kept[row]), len(sample))
        assert made_of.sum(axis=0).max() == 1 and made_of.any(axis=1).all()
        newlines = np.flatnonzero(sample.kind == NEWLINE)
        slots = np.searchsorted(run.kept[row], newlines)
        assert (made_of[slots].sum(axis=1) == 1).all() and made_of[slots, newlines].all()
        for slot in made_of:
            members = np.flatnonzero(slot)
            assert len({(sample.image[i], sample.crop[i]) for i in members}) == 1, "crops do not mix"
        with prune(model, pruner) as alone:
            _, own = answer(NEXT, model, NEXT.row(prompts, row))
        assert alone.kept[0].tolist() == run.kept[row].tolist()
        torch.testing.assert_close(logits[:, row], own[:, 0], atol=1e-5, rtol=0)


def test_hired_shares_by_what_each_tile_shows() -> None:
    """A class token that attends to the top left alone: that tile gets all that the whole view leaves."""
    model, inputs = NEXT.model("sdpa"), NEXT.batch("one")
    regions = family_of(model).regions(model, inputs)
    assert regions is not None and len(regions) == 1
    assert regions[0][0].tolist() == [0, 0, 1, 1] and regions[0].shape == (5, 4)
    left, top, right, bottom = regions[0][1:].T
    assert left.tolist() == [0, 0.5, 0, 0.5] and right.tolist() == [0.5, 1, 0.5, 1]
    assert (top[:2] == 0).all() and (bottom[2:] == 1).all() and np.allclose(top[2:], bottom[:2])
    with torch.no_grad(), prune(model, HiRED(keep=5)) as run:
        model(**inputs)
    table = run.table().query("kind == 'patch' and kept")
    assert table[table["crop"] == 0].shape[0] == 12  # half of 25, rounded down
    assert table.groupby("crop").size().max() <= PATCHES


def test_what_cannot_be_right_is_refused() -> None:
    model, inputs = ONEVISION.model("sdpa"), ONEVISION.batch("one")
    with (
        pytest.raises(DartLabError, match="shrinks this picture or video behind the projector"),
        prune(model, DivPrune(keep=5, where="PROJECTED")),
    ):
        model(**inputs)
    with prune(model, DivPrune(keep=5)) as run, torch.no_grad():
        model(**inputs)
    assert run.got == [5]
    qwen = QWEN.model("sdpa")
    with pytest.raises(DartLabError, match="reduce inside the language model"), prune(qwen, FasterVLM(keep=5)):
        pass
