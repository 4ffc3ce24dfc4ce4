"""Small random Qwen-VL models of the real classes, and left-padded batches of pictures of unlike shapes for them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

IMAGE, VIDEO, START, END, WORDS = 5, 6, 7, 8, 60
INPUTS = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
PATCH, HIDDEN, HEADS = 4, 32, 2
Grid = tuple[int, int] | tuple[int, int, int]
STEP = 2  # frames of a video that the tower merges


def qwen_model(kind: str, *, attention: str = "sdpa", layers: int = 4) -> Any:
    """Weights large enough that attention is not uniform."""
    vision: dict[str, Any] = {
        "depth": 2, "patch_size": PATCH, "num_heads": HEADS, "spatial_merge_size": 2, "temporal_patch_size": STEP,
        "initializer_range": 0.2,
    }
    if kind == "qwen2_vl":
        vision |= {"embed_dim": HIDDEN, "hidden_size": HIDDEN, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": HIDDEN, "out_hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    if kind == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {
        "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": layers,
        "head_dim": HIDDEN // HEADS,
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "vocab_size": WORDS, "initializer_range": 0.2,
        "max_position_embeddings": 512, "rope_scaling": rope, "rope_parameters": rope, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }
    config = getattr(transformers, f"{CLASSES[kind]}Config")(
        vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    model.set_attn_implementation(attention)
    return model.eval()


def qwen_batch(prompts: Sequence[Sequence[Grid]], *, timed: bool = False) -> dict[str, Tensor]:
    """One prompt an entry, with pictures of (rows, columns) of visual tokens or videos of (steps, rows, columns).

    Left-padded. `timed`: every step of a video has its own tags and words in front, as in Qwen3-VL.
    """
    rows: list[list[int]] = []
    grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    pixels: dict[int, list[Tensor]] = {IMAGE: [], VIDEO: []}
    for number, pictures in enumerate(prompts):
        draw = torch.Generator().manual_seed(10 * number + len(pictures))
        row = [1, *words(draw, 2 + number)]
        for picture in pictures:
            kind = VIDEO if len(picture) > 2 else IMAGE
            steps, height, width = (1, *picture)[-3:]
            parts = steps if timed else 1
            for _ in range(parts):
                times = words(draw, 2) if timed and kind == VIDEO else []
                row += [*times, START, *[kind] * (steps * height * width // parts), END]
            row += words(draw, 2)
            grids[kind].append([steps, 2 * height, 2 * width])
            pixels[kind].append(torch.randn(4 * steps * height * width, 3 * STEP * PATCH * PATCH, generator=draw))
        rows.append(row + words(draw, 3))
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    for kind, (values, grid) in INPUTS.items():
        if grids[kind]:
            inputs |= {values: torch.cat(pixels[kind]), grid: torch.tensor(grids[kind])}
    taken = inspect.signature(transformers.Qwen2VLForConditionalGeneration.forward).parameters
    if "mm_token_type_ids" in taken:
        inputs["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO)
    return inputs


def one_picture(image: Image.Image) -> dict[str, Tensor]:
    """A prompt about one picture, as the real image processor makes it."""
    made = _processed(image)
    _, height, width = made["image_grid_thw"][0].tolist()
    return {**qwen_batch([[(height // 2, width // 2)]]), "pixel_values": made["pixel_values"]}


def one_video(frames: Sequence[Image.Image], *, timed: bool = False) -> dict[str, Tensor]:
    """A prompt about one video: its frames as the real image processor makes them, `STEP` of them to a step."""
    made = [_processed(frame) for frame in frames]
    _, height, width = made[0]["image_grid_thw"][0].tolist()
    patches = torch.stack([each["pixel_values"].view(-1, 3, STEP, PATCH, PATCH)[:, :, 0] for each in made])
    steps = patches.unflatten(0, (-1, STEP)).permute(0, 2, 3, 1, 4, 5)
    prompt = qwen_batch([[(len(steps), height // 2, width // 2)]], timed=timed)
    return {**prompt, "pixel_values_videos": steps.flatten(0, 1).flatten(1)}


def _processed(image: Image.Image) -> dict[str, Tensor]:
    processor = transformers.Qwen2VLImageProcessor(
        patch_size=PATCH, merge_size=2, temporal_patch_size=STEP, min_pixels=(4 * PATCH) ** 2,
        max_pixels=(32 * PATCH) ** 2,
    )
    return dict(processor([image], return_tensors="pt", input_data_format="channels_last"))


def words(draw: torch.Generator, count: int) -> list[int]:
    return torch.randint(10, WORDS, (count,), generator=draw).tolist()
