"""Small random MiniCPM-V 2.6 models of the stand-in class, and left-padded batches of sliced pictures for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.vlm.families.anyres_models import words
from tests.vlm.families.minicpm_code import MiniCPMV, MiniCPMVConfig

UNKNOWN, IMAGE, IMAGE_END, SLICE, SLICE_END, BREAK, WORDS = 3, 4, 5, 6, 7, 8, 60
QUERIES, PATCH, HIDDEN, HEADS, SIDE = 4, 4, 32, 2, 16
TOKENIZER = SimpleNamespace(convert_tokens_to_ids=lambda token: 2)
Grid = tuple[int, int]  # slices down and across; (0, 0): the whole picture alone


def minicpm_model(*, attention: str = "sdpa", layers: int = 4, vision_batch: int = 16, vocabulary: int = WORDS) -> Any:
    """Weights large enough that attention is not uniform."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS,
        image_size=SIDE, patch_size=PATCH, initializer_range=0.2,
    )  # fmt: skip
    config = MiniCPMVConfig(
        vision_config=vision, query_num=QUERIES, patch_size=PATCH, vision_batch_size=vision_batch, hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=1,
        vocab_size=vocabulary, initializer_range=0.2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MiniCPMV(config)
    model.set_attn_implementation(attention)
    model.llm.set_attn_implementation(attention)
    return model.eval()


def minicpm_batch(prompts: Sequence[Sequence[Grid]]) -> dict[str, Any]:
    """One prompt an entry, with pictures in these slices; what the public processor returns, and position ids."""
    rows: list[list[int]] = []
    pixels: list[list[Tensor]] = []
    sizes: list[Tensor] = []
    for number, pictures in enumerate(prompts):
        draw = torch.Generator().manual_seed(10 * number + len(pictures))
        row, own = [1, *words(draw, 2 + number), UNKNOWN], []  # an id of placeholders outside of pictures
        for down, across in pictures:
            row += tagged(down, across) + words(draw, 2)
            own += [(int(h), int(w)) for h, w in torch.randint(2, 5, (1 + down * across, 2), generator=draw)]
        rows.append(row + words(draw, 3))
        pixels.append([torch.randn(3, PATCH, height * width * PATCH, generator=draw) for height, width in own])
        sizes.append(torch.tensor(own, dtype=torch.int32).reshape(-1, 2))
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    opens, closes = (torch.isin(ids, torch.tensor(tags)) for tags in ((IMAGE, SLICE), (IMAGE_END, SLICE_END)))
    bounds = [
        torch.stack([first.nonzero()[:, 0] + 1, last.nonzero()[:, 0]], dim=1)
        for first, last in zip(opens, closes, strict=True)
    ]
    return {
        "input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "tgt_sizes": sizes, "image_bound": bounds,
    }  # fmt: skip


def tagged(down: int, across: int) -> list[int]:
    """A picture as the processor writes it: the whole of it, then its slices row by row."""
    view = [UNKNOWN] * QUERIES
    lines = [[SLICE, *view, SLICE_END] * across for _ in range(down)]
    out = [IMAGE, *view, IMAGE_END]
    for number, line in enumerate(lines):
        out += [*([BREAK] if number else []), *line]
    return out


def row_of(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """One prompt of a batch on its own, its padding taken away."""
    padding = int((~inputs["attention_mask"][row]).sum())
    return {
        "input_ids": inputs["input_ids"][row : row + 1, padding:],
        "attention_mask": inputs["attention_mask"][row : row + 1, padding:],
        "pixel_values": [inputs["pixel_values"][row]],
        "tgt_sizes": [inputs["tgt_sizes"][row]],
        "image_bound": [inputs["image_bound"][row] - padding],
    }


def as_data(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `forward`, whose data also holds the positions."""
    positions = (inputs["attention_mask"].long().cumsum(dim=1) - 1).clamp(min=0)
    return {"data": {**inputs, "position_ids": positions}, "attention_mask": inputs["attention_mask"]}
