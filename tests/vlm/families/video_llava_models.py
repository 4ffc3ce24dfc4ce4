"""Small random Video-LLaVA models of the real class; pictures and videos from the real image processor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from tests.vlm.families.anyres_models import picture, words

IMAGE, VIDEO, WORDS = 5, 6, 60
PATCH, VIEW, HIDDEN, HEADS = 4, 16, 32, 2
FRAMES = 3  # of every video of a batch
PATCHES = (VIEW // PATCH) ** 2
PICTURE, FILM = "picture", "film"  # what a prompt is about


def video_llava_model(*, attention: str = "sdpa", layers: int = 4) -> Any:
    """Weights large enough that attention is not uniform; frames of 4 × 4 patches and a class token."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS,
        image_size=VIEW, patch_size=PATCH, initializer_range=0.2,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=1, vocab_size=WORDS, initializer_range=0.2, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config = transformers.VideoLlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, video_token_index=VIDEO
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.VideoLlavaForConditionalGeneration(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    model.set_attn_implementation(attention)
    return model.eval()


def video_llava_batch(prompts: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """One prompt an entry, about pictures and videos; left-padded."""
    seeds = itertools.count()
    pictures = [processed([picture((30, 20), next(seeds))])[0] for prompt in prompts for x in prompt if x == PICTURE]
    films = [
        processed([picture((30, 20), next(seeds)) for _ in range(FRAMES)])
        for prompt in prompts for x in prompt if x == FILM
    ]  # fmt: skip
    return {**prompt_ids(prompts), **pixels(pictures, films)}


def prompt_ids(prompts: Sequence[Sequence[str]], frames: int = FRAMES) -> dict[str, Tensor]:
    """Placeholders, words around them."""
    rows = []
    for number, prompt in enumerate(prompts):
        draw = torch.Generator().manual_seed(10 * number + len(prompt))
        row = [1, *words(draw, 2 + number)]
        for kind in prompt:
            row += [IMAGE] * PATCHES if kind == PICTURE else [VIDEO] * (frames * (PATCHES + 1))
            row += words(draw, 2)
        rows.append(row + words(draw, 3))
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def pixels(pictures: Sequence[Tensor], films: Sequence[Tensor]) -> dict[str, Tensor]:
    """The model's inputs for pictures `(3, height, width)` and films `(frames, 3, height, width)`."""
    found = {"pixel_values_images": torch.stack(list(pictures))} if pictures else {}
    return {**found, "pixel_values_videos": torch.stack(list(films))} if films else found


def processed(images: Sequence[Image.Image]) -> Tensor:
    """`(pictures, 3, height, width)` as the family's image processor makes them."""
    processor = transformers.VideoLlavaImageProcessor(
        size={"shortest_edge": VIEW}, crop_size={"height": VIEW, "width": VIEW}
    )
    made = processor(list(images), return_tensors="pt", input_data_format="channels_last")
    return next(iter(made.values()))


def one_picture(image: Image.Image) -> dict[str, Tensor]:
    """A prompt about one picture."""
    return {**prompt_ids([[PICTURE]]), **pixels([processed([image])[0]], [])}


def one_video(frames: Sequence[Image.Image]) -> dict[str, Tensor]:
    """A prompt about one video."""
    return {**prompt_ids([[FILM]], len(frames)), **pixels([], [processed(frames)])}
