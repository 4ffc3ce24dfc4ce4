"""Small random LLaVA-NeXT and LLaVA-OneVision models of the real classes; batches from the real image processors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

IMAGE, VIDEO, WORDS = 5, 6, 60
PATCH, VIEW, HIDDEN, HEADS = 4, 16, 32, 2
PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48], [48, 16]]
FRAMES, POOLED = 3, 4  # frames of every video of a batch, and tokens of each: 4 × 4 patches, pooled two by two
CLASSES = {"llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}
Size = tuple[int, int]


def anyres_model(kind: str, *, attention: str = "sdpa", layers: int = 4, view: int = VIEW) -> Any:
    """Weights large enough that attention is not uniform; tiles of 4 × 4 patches, at most four of them."""
    tower = {
        "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "image_size": view, "patch_size": PATCH, "initializer_range": 0.2,
    }  # fmt: skip
    clip = kind == "llava_next"
    vision = (transformers.CLIPVisionConfig if clip else transformers.SiglipVisionConfig)(**tower)
    text = (transformers.LlamaConfig if clip else transformers.Qwen2Config)(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=1, vocab_size=WORDS, initializer_range=0.2, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    named = {"image_token_index": IMAGE} | ({} if clip else {"video_token_index": VIDEO})
    if kind == "llava_onevision":  # two tiles' worth of patches: whatever is larger gets shrunk
        named |= {"vision_aspect_ratio": "anyres_max_2", "vision_feature_layer": -1}
        named |= {"vision_feature_select_strategy": "full"}
    config = getattr(transformers, f"{CLASSES[kind]}Config")(
        vision_config=vision, text_config=text, image_grid_pinpoints=PINPOINTS, **named
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")(config)
        model.model.image_newline.data.normal_()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    model.set_attn_implementation(attention)
    return model.eval()


def picture(size: Size, seed: int = 0) -> Image.Image:
    """Noise of (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def processed(kind: str, prompts: Sequence[Sequence[Image.Image]]) -> dict[str, Tensor]:
    """What the family's own image processor makes of the pictures of several prompts."""
    name = f"{CLASSES[kind]}ImageProcessor"
    options: dict[str, Any] = {"image_grid_pinpoints": PINPOINTS, "do_normalize": True}
    if kind == "llava_next":
        options |= {"size": {"shortest_edge": VIEW}, "crop_size": {"height": VIEW, "width": VIEW}}
    else:
        options |= {"size": {"height": VIEW, "width": VIEW}}
    nested = [list(pictures) for pictures in prompts]
    made = getattr(transformers, name)(**options)(nested, return_tensors="pt", input_data_format="channels_last")
    return {key: value for key, value in made.items() if isinstance(value, Tensor)}


def anyres_batch(kind: str, prompts: Sequence[Sequence[Size]]) -> dict[str, Tensor]:
    """One prompt an entry, with pictures of these (width, height); left-padded."""
    seeds = itertools.count()
    inputs = processed(kind, [[picture(size, next(seeds)) for size in sizes] for sizes in prompts])
    return {**prompt_ids(prompts, visual_counts(kind, inputs)), **inputs}


def video_batch(prompts: Sequence[Sequence[Size | None]]) -> dict[str, Tensor]:
    """LLaVA-OneVision: one prompt an entry, about pictures of these (width, height) and, where None, a video."""
    kind, seeds = "llava_onevision", itertools.count()
    sizes = [[size for size in prompt if size is not None] for prompt in prompts]
    drawn = [[picture(size, next(seeds)) for size in own] for own in sizes if own]
    inputs = processed(kind, drawn) if drawn else {}
    counts = visual_counts(kind, inputs) if drawn else []
    films = [video_pixels([picture((30, 20), next(seeds)) for _ in range(FRAMES)]) for p in prompts for x in p if not x]
    videos = {"pixel_values_videos": torch.cat(films)} if films else {}
    return {**prompt_ids(prompts, counts), **inputs, **videos}


def one_video(frames: Sequence[Image.Image]) -> dict[str, Tensor]:
    """A prompt about one video."""
    return {**prompt_ids([[None]], [], len(frames)), "pixel_values_videos": video_pixels(frames)}


def video_pixels(frames: Sequence[Image.Image]) -> Tensor:
    """`(1, frames, 3, height, width)`: each frame stretched over the view, as the image processor's base view is."""
    return torch.stack([processed("llava_onevision", [[frame]])["pixel_values"][0, 0] for frame in frames])[None]


def prompt_ids(prompts: Sequence[Sequence[Any]], visual: Sequence[int], frames: int = FRAMES) -> dict[str, Tensor]:
    """Left-padded token ids: `visual` placeholders for each picture, a video's for None, words around them."""
    counts = iter(visual)
    rows = []
    for number, sizes in enumerate(prompts):
        draw = torch.Generator().manual_seed(10 * number + len(sizes))
        row = [1, *words(draw, 2 + number)]
        for size in sizes:
            row += [IMAGE] * next(counts) if size else [VIDEO] * (frames * POOLED + 1)
            row += words(draw, 2)
        rows.append(row + words(draw, 3))
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def one_picture(kind: str, image: Image.Image) -> dict[str, Tensor]:
    """A prompt about one picture."""
    inputs = processed(kind, [[image]])
    return {**prompt_ids([[image]], visual_counts(kind, inputs)), **inputs}


def visual_counts(kind: str, inputs: dict[str, Tensor]) -> list[int]:
    """Visual tokens of every picture, as the model makes them."""
    model = anyres_model(kind, layers=1)
    given = {name: value for name, value in inputs.items() if name != "attention_mask"}
    with torch.no_grad():
        out = model.model.get_image_features(**given)
    features = getattr(out, "pooler_output", out)
    return [len(each) for each in features]


def words(draw: torch.Generator, count: int) -> list[int]:
    return torch.randint(10, WORDS, (count,), generator=draw).tolist()
