"""Small random InternVL, Idefics3 and SmolVLM models of the real classes; batches from the real image processors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from dart_lab.vlm import compat
from tests.vlm.families.anyres_models import Size, picture, words

IMAGE, BREAK, FAKE, WHOLE, WORDS = 5, 6, 7, 8, 60
TAGS = 8  # ids of the tags of row 1, row 2 … lie so far apart
PATCH, FOLD, VIEW, HIDDEN, HEADS = 4, 2, 24, 32, 2
SIDE = VIEW // PATCH // FOLD  # tokens a side of a tile
LONGEST = 3 * VIEW  # to which Idefics3 resizes the longer side
MOST_TILES = 6  # of InternVL, without the thumbnail
CLASSES = {"internvl": "InternVL", "idefics3": "Idefics3", "smolvlm": "SmolVLM"}


def tile_model(kind: str, *, attention: str = "sdpa", layers: int = 4) -> Any:
    """Weights large enough that attention is not uniform; tiles of 6 × 6 patches, folded to 3 × 3 tokens."""
    vision: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "image_size": VIEW, "patch_size": PATCH, "initializer_range": 0.2,
    }  # fmt: skip
    config_class = getattr(transformers, f"{CLASSES[kind]}Config")
    named: dict[str, Any] = {"image_token_id": IMAGE}
    if kind == "internvl":
        vision |= {"image_size": (VIEW, VIEW), "patch_size": (PATCH, PATCH), "layer_scale_init_value": 0.7}
        named |= {"downsample_ratio": 1 / FOLD, "image_seq_length": SIDE**2, "tie_word_embeddings": False}
    else:
        named |= {"scale_factor": FOLD, "pad_token_id": 0}
    text = (transformers.Qwen2Config if kind == "internvl" else transformers.LlamaConfig)(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=1, vocab_size=WORDS + 2 * TAGS**2, initializer_range=0.2, max_position_embeddings=1024,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config = config_class(vision_config=vision, text_config=text, **named)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")(config)
        if kind == "internvl":
            model.model.vision_tower.embeddings.position_embeddings.data.normal_()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    model.set_attn_implementation(attention)
    return model.eval()


def processed(kind: str, prompts: Sequence[Sequence[Image.Image]]) -> dict[str, Any]:
    """What the family's own image processor makes of the pictures of several prompts, the tiles' numbers included."""
    nested: Any = [list(pictures) for pictures in prompts]
    if kind == "internvl":
        processor = transformers.GotOcr2ImageProcessor(
            size={"height": VIEW, "width": VIEW}, crop_to_patches=True, max_patches=MOST_TILES
        )
        nested = [one for pictures in nested for one in pictures]
    else:
        processor = splitting(kind)
    asked = {} if kind == "internvl" else {"return_row_col_info": True}
    return dict(processor(nested, return_tensors="pt", input_data_format="channels_last", **asked))


def splitting(kind: str) -> Any:
    """The image processor of Idefics3 or SmolVLM."""
    name = f"{CLASSES[kind]}ImageProcessor"
    made = compat.hidden_image_processor(name) or getattr(transformers, name)
    return made(size={"longest_edge": LONGEST}, max_image_size={"longest_edge": VIEW})


def tile_batch(kind: str, prompts: Sequence[Sequence[Size]]) -> dict[str, Tensor]:
    """One prompt an entry, with pictures of these (width, height); left-padded."""
    seeds = itertools.count()
    return _batch(kind, [[picture(size, next(seeds)) for size in sizes] for sizes in prompts])


def one_picture(kind: str, image: Image.Image) -> dict[str, Tensor]:
    """A prompt about one picture."""
    return _batch(kind, [[image]])


def tiles_of(ids: Tensor) -> list[int]:
    """Tiles in each prompt of a batch."""
    return ((ids == IMAGE).sum(dim=1) // SIDE**2).tolist()


def _batch(kind: str, prompts: Sequence[Sequence[Image.Image]]) -> dict[str, Tensor]:
    made = processed(kind, prompts)
    shown = iter(
        [[FAKE, *[IMAGE] * (int(n) * SIDE**2), WHOLE] for n in made["num_patches"]]
        if kind == "internvl"
        else [
            tagged(int(rows), int(columns))
            for row, column in zip(made["rows"], made["cols"], strict=True)
            for rows, columns in zip(row, column, strict=True)
        ]
    )
    rows = []
    for number, pictures in enumerate(prompts):
        draw = torch.Generator().manual_seed(10 * number + len(pictures))
        row = [1, *words(draw, 2 + number)]
        for _ in pictures:
            row += next(shown)
        rows.append(row + words(draw, 3))
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
        **{key: made[key] for key in ("pixel_values", "pixel_attention_mask") if key in made},
    }


def tagged(rows: int, columns: int) -> list[int]:
    """A picture of Idefics3 as its processor writes it: tiles row by row with their tags, then the whole picture."""
    tile = [IMAGE] * SIDE**2
    out = []
    for row in range(rows):
        for column in range(columns):
            out += [FAKE, WORDS + TAGS * row + column, *tile]
        out.append(BREAK)
    return [*out, *([BREAK] if rows else []), FAKE, WHOLE, *tile, FAKE]
