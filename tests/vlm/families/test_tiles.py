"""InternVL, Idefics3, SmolVLM: which tiles make up a picture, what can be reduced in front, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, DivPrune, FasterVLM, Random, ToMe
from dart_lab.vlm.insert import prune
from dart_lab.vlm.locate import layout
from tests.vlm.families import test_every_family, test_places, tile_models
from tests.vlm.families.anyres_models import picture
from tests.vlm.families.test_every_family import answer
from tests.vlm.families.test_fronts import embeddings
from tests.vlm.families.zoo import FAMILIES, SMOLVLM, Zoo

INTERNVL, IDEFICS = (next(kind for kind in FAMILIES if str(kind) == name) for name in ("internvl", "idefics3"))
PER_TILE = tile_models.SIDE**2


@pytest.mark.parametrize("prompts", ["one", "padded"])
@pytest.mark.parametrize("pruner", [DivPrune(keep=4, where="PROJECTED"), DivPrune(keep=7)], ids=lambda p: p.stage.kind)
@pytest.mark.parametrize("kind", [INTERNVL, IDEFICS, SMOLVLM], ids=str)
def test_dropping_equals_feeding_the_short_prompt(kind: Zoo, pruner: Any, prompts: str) -> None:
    model, inputs = kind.model("sdpa"), kind.batch(prompts)
    full = embeddings(model, inputs)
    with prune(model, pruner) as run:
        _, logits = answer(kind, model, inputs)
    for row, tiles in enumerate(tile_models.tiles_of(inputs["input_ids"])):
        assert len(run.kept[row]) == (pruner.keep if pruner.stage.kind == "LLM_IN" else tiles * pruner.keep)
        stays = ~torch.isin(inputs["input_ids"][row], torch.tensor(kind.visual)) & inputs["attention_mask"][row].bool()
        stays[torch.from_numpy(run.positions[row])] = True
        short = full[row : row + 1, stays]
        _, alone = answer(
            kind, model, {"inputs_embeds": short, "attention_mask": torch.ones(short.shape[:2], dtype=torch.long)}
        )
        torch.testing.assert_close(logits[:, row], alone[:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pruner", [FasterVLM(keep=5), ToMe(keep=8, blocks=1)], ids=lambda p: p.name)
@pytest.mark.parametrize("kind", [INTERNVL, IDEFICS], ids=str)
def test_single_patches_in_front_of_the_fold_are_refused(kind: Zoo, pruner: Any) -> None:
    with pytest.raises(DartLabError, match="folds 2 × 2 patches into one token"), prune(kind.model("sdpa"), pruner):
        pass


def test_smolvlm_is_idefics3() -> None:
    test_every_family.test_dropping_equals_masking(SMOLVLM, "sdpa", "padded", DART(keep=5))
    test_places.test_painting_under_a_box_moves_its_token_and_no_distant_one(SMOLVLM, (97, 61))


@pytest.mark.parametrize("kind", [INTERNVL, IDEFICS], ids=str)
def test_every_picture_of_a_batch_has_its_tiles(kind: Zoo) -> None:
    """Against the processor's own numbers of tiles."""
    sizes = [[(30, 20)], [(7, 60), (50, 50)], [(24, 24), (90, 20)]]
    seeds = iter(range(9))
    pictures = [[picture(size, next(seeds)) for size in prompt] for prompt in sizes]
    made = tile_models.processed(kind.name, pictures)
    found = layout(kind.model("sdpa"), kind.build_batch(sizes), [one for prompt in pictures for one in prompt])
    crops = [int(t.crop[t.image == i].max()) + 1 for t in found.samples for i in np.unique(t.image)]
    grids = []
    for tokens in found.samples:
        for i in np.unique(tokens.image):
            own = tokens.image == i
            assert found.grid(found.samples.index(tokens), i) == (tile_models.SIDE, tile_models.SIDE)
            corners = tokens.box[own][::PER_TILE][:-1]
            grids.append((len(np.unique(corners[:, 1])), len(np.unique(corners[:, 0]))))
    if kind is INTERNVL:
        assert crops == made["num_patches"].tolist()
    else:
        rows, columns = ([n for prompt in made[name] for n in prompt] for name in ("rows", "cols"))
        assert grids == list(zip(rows, columns, strict=True))
        assert crops == [r * c + 1 for r, c in grids]


def test_internvl_without_the_pictures_places_only_what_is_certain() -> None:
    sample = layout(INTERNVL.model("sdpa"), INTERNVL.batch("one")).samples[0]
    last = sample.crop == sample.crop.max()
    assert sample.crop.max() > 0 and np.isnan(sample.box[~last]).all()
    assert sample.box[last][-1].tolist() == [16, 16, tile_models.VIEW, tile_models.VIEW]
    assert sample.row.max() == tile_models.SIDE - 1 == sample.column.max()


@pytest.mark.parametrize("kind", [INTERNVL, IDEFICS], ids=str)
def test_the_view_of_a_sample_is_the_whole_picture(kind: Zoo) -> None:
    model, inputs = kind.model("sdpa"), kind.batch("one")
    with prune(model, Random(keep=5)) as run, torch.no_grad():
        model(**inputs)
    pixels = inputs["pixel_values"].flatten(0, -4)[-1]
    scaled = (pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255
    assert run.samples[0].view is not None
    assert np.array_equal(run.samples[0].view, scaled.round().byte().permute(1, 2, 0).numpy())


def test_what_cannot_be_told_apart_is_refused() -> None:
    tile = [tile_models.IMAGE] * PER_TILE

    def ids(*row: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([row])}

    fake, whole, tag, words = tile_models.FAKE, tile_models.WHOLE, tile_models.WORDS, [20, 21]
    internvl, idefics = INTERNVL.model("sdpa"), IDEFICS.model("sdpa")
    for model, row in [
        (internvl, [fake, *tile, *tile, whole, *words]),
        (idefics, [fake, whole, *tile, *tile, fake, *words]),
    ]:
        with pytest.raises(DartLabError, match="two pictures with no token between them"):
            layout(model, ids(*row))
        with pytest.raises(DartLabError, match="cuts an image"):
            layout(model, ids(fake, whole, *tile[1:], fake))
    with pytest.raises(DartLabError, match="without the processor's tag"):
        layout(idefics, ids(1, *words, *tile, *words, *tile, 22))
    with pytest.raises(DartLabError, match="ends in a tile"):
        layout(idefics, ids(fake, tag, *tile, fake, tag + 1, *tile))
    with pytest.raises(DartLabError, match="do not make up whole rows"):
        rows = [fake, tag, *tile, fake, tag + 1, *tile, 6, fake, tag + 8, *tile, 6]
        layout(idefics, ids(*rows, fake, whole, *tile, fake))
    with pytest.raises(DartLabError, match="3 images were given, but the prompts hold 1"):
        layout(internvl, INTERNVL.batch("one"), [picture((30, 20))] * 3)


def test_tags_of_the_real_processor() -> None:
    """Pictures and rows of tiles found in what Idefics3's own processor writes, with two pictures side by side."""
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<pad>"]
    special += [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    processor = transformers.Idefics3Processor(tile_models.splitting("idefics3"), tokenizer, image_seq_len=PER_TILE)
    made = processor(
        images=[[picture((90, 40)), picture((40, 90)), picture((50, 50))]], return_tensors="pt",
        text=["what <image><image> and <image>?"],
    )  # fmt: skip
    model = tile_models.tile_model("idefics3", layers=1)
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    pictures = [picture((90, 40)), picture((40, 90)), picture((50, 50))]
    sample = layout(model, made, pictures).samples[0]
    assert made["pixel_values"].shape[1] == sum(int(sample.crop[sample.image == i].max()) + 1 for i in range(3))
    corners = [sample.box[sample.image == i][::PER_TILE][:-1] for i in range(3)]
    assert [(len(np.unique(c[:, 1])), len(np.unique(c[:, 0]))) for c in corners] == [(2, 3), (3, 2), (3, 3)]
