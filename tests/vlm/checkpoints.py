"""Tiny random checkpoints of every family, written file by file as the hub holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.models import PATCH as LLAVA_PATCH
from tests.models import llava_model
from tests.vlm.families import anyres_models, qwen_models, tile_models, video_llava_models

LLAVA_GRID = 4
_TAGS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))  # that Idefics3 looks up
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "<img>", "</img>", "<IMG_CONTEXT>", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>", *_TAGS,
)  # fmt: skip
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = {token: number for number, token in enumerate([*_BYTES, *SPECIAL])}
_MEAN = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
_VIEW = {"height": anyres_models.VIEW, "width": anyres_models.VIEW}
_QWEN_PIXELS = {"min_pixels": (4 * qwen_models.PATCH) ** 2, "max_pixels": (32 * qwen_models.PATCH) ** 2}
_LLAVA_SIDE = LLAVA_GRID * LLAVA_PATCH


def _template(image: str) -> str:
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + image + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _qwen(kind: str, processor: str, image_processor: str, **sizes: Any) -> dict[str, Any]:
    return {
        "model": lambda: qwen_models.qwen_model(kind), "image": "<|image_pad|>", "tokenizer_class": "Qwen2Tokenizer",
        "template": _template("<|vision_start|><|image_pad|><|vision_end|>"),
        "preprocessor": {
            "image_processor_type": image_processor, "processor_class": processor, "patch_size": qwen_models.PATCH,
            "temporal_patch_size": 2, "merge_size": 2, **_MEAN, **sizes,
        },
    }  # fmt: skip


def _idefics(kind: str) -> dict[str, Any]:
    name = tile_models.CLASSES[kind]
    return {
        "model": lambda: tile_models.tile_model(kind), "image": "<image>", "template": _template("<image>"),
        "preprocessor": {
            "image_processor_type": f"{name}ImageProcessor", "processor_class": f"{name}Processor",
            "size": {"longest_edge": tile_models.LONGEST}, "max_image_size": {"longest_edge": tile_models.VIEW},
            "do_image_splitting": True, **_MEAN,
        },
        "processor": {"processor_class": f"{name}Processor", "image_seq_len": tile_models.SIDE**2},
    }  # fmt: skip


#: model_type → what its folder holds. Class names as hub checkpoints carry them, so some end in Fast.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llava": {
        "model": lambda: llava_model(grid=LLAVA_GRID), "image": "<image>",
        "preprocessor": {
            "image_processor_type": "CLIPImageProcessorFast", "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": _LLAVA_SIDE}, "crop_size": {"height": _LLAVA_SIDE, "width": _LLAVA_SIDE}, **_MEAN,
        },
        "processor": {
            "processor_class": "LlavaProcessor", "patch_size": LLAVA_PATCH, "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default", "image_token": "<image>",
        },
    },
    "llava_next": {
        "model": lambda: anyres_models.anyres_model("llava_next"), "image": "<image>",
        "preprocessor": {
            "image_processor_type": "LlavaNextImageProcessorFast", "processor_class": "LlavaNextProcessor",
            "image_grid_pinpoints": anyres_models.PINPOINTS, "size": {"shortest_edge": anyres_models.VIEW},
            "crop_size": _VIEW, **_MEAN,
        },
        "processor": {
            "processor_class": "LlavaNextProcessor", "patch_size": anyres_models.PATCH,
            "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default", "image_token": "<image>",
        },
    },
    "llava_onevision": {
        "model": lambda: anyres_models.anyres_model("llava_onevision"), "image": "<image>",
        "preprocessor": {
            "image_processor_type": "LlavaOnevisionImageProcessor", "processor_class": "LlavaOnevisionProcessor",
            "image_grid_pinpoints": anyres_models.PINPOINTS, "size": _VIEW, **_MEAN,
        },
        "processor": {
            "processor_class": "LlavaOnevisionProcessor", "vision_feature_select_strategy": "full",
            "num_image_tokens": (anyres_models.VIEW // anyres_models.PATCH) ** 2, "image_token": "<image>",
            "video_token": "<video>", "vision_aspect_ratio": "anyres_max_2",
        },
        "video": {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": _VIEW, **_MEAN},
    },
    "video_llava": {
        "model": video_llava_models.video_llava_model, "image": "<image>",
        "preprocessor": {
            "image_processor_type": "VideoLlavaImageProcessor", "processor_class": "VideoLlavaProcessor",
            "size": {"shortest_edge": video_llava_models.VIEW},
            "crop_size": {"height": video_llava_models.VIEW, "width": video_llava_models.VIEW}, **_MEAN,
        },
        "processor": {
            "processor_class": "VideoLlavaProcessor", "patch_size": video_llava_models.PATCH,
            "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default", "image_token": "<image>",
            "video_token": "<video>",
        },
    },
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VLProcessor", "Qwen2VLImageProcessor", **_QWEN_PIXELS),
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor", "Qwen2VLImageProcessorFast", **_QWEN_PIXELS),
    "qwen3_vl": _qwen(
        "qwen3_vl", "Qwen3VLProcessor", "Qwen2VLImageProcessorFast",
        size={"shortest_edge": _QWEN_PIXELS["min_pixels"], "longest_edge": _QWEN_PIXELS["max_pixels"]},
    )
    | {"video": {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": qwen_models.PATCH}},
    "internvl": {
        "model": lambda: tile_models.tile_model("internvl"), "image": "<IMG_CONTEXT>",
        "tokenizer_class": "Qwen2Tokenizer", "template": _template("<IMG_CONTEXT>\n"),
        "named_tokens": {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "preprocessor": {
            "image_processor_type": "GotOcr2ImageProcessorFast", "processor_class": "InternVLProcessor",
            "size": {"height": tile_models.VIEW, "width": tile_models.VIEW}, "crop_to_patches": True,
            "min_patches": 1, "max_patches": tile_models.MOST_TILES, **_MEAN,
        },
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": tile_models.SIDE**2},
        "video": {"video_processor_type": "InternVLVideoProcessor"},
    },
    "idefics3": _idefics("idefics3"),
    "smolvlm": _idefics("smolvlm") | {"video": {"video_processor_type": "SmolVLMVideoProcessor"}},
}  # fmt: skip


def save_checkpoint(kind: str, folder: Path, **options: Any) -> Path:
    """Write the folder of a random model of `model_type` `kind`: config, weights, tokenizer, processors' configs.

    `options` go to the model's `save_pretrained` (max_shard_size …).
    """
    parts = CHECKPOINTS[kind]
    model = parts["model"]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(len(TOKENS), mean_resizing=False)
    _name_tokens(model.config, parts["image"])
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = TOKENS["<|im_end|>"]
    model.save_pretrained(folder, **options)
    save_tokenizer(
        folder, parts.get("tokenizer_class", "PreTrainedTokenizerFast"), parts.get("named_tokens", {})
    )
    _write(folder / "preprocessor_config.json", parts["preprocessor"])
    _write(folder / "chat_template.json", {"chat_template": parts.get("template", _template("<image>\n"))})
    if "processor" in parts:
        _write(folder / "processor_config.json", parts["processor"])
    if "video" in parts:
        _write(folder / "video_preprocessor_config.json", parts["video"])
    return folder


def _name_tokens(config: Any, image: str) -> None:
    """Tell the model which ids the tokenizer gives to pictures."""
    if hasattr(config, "vision_start_token_id"):
        ids = {"image": image, "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
        ids["vision_end"] = "<|vision_end|>"
        for name, token in ids.items():
            setattr(config, f"{name}_token_id", TOKENS[token])
    else:
        name = "image_token_index" if hasattr(config, "image_token_index") else "image_token_id"
        setattr(config, name, TOKENS[image])
        if hasattr(config, "video_token_index"):
            config.video_token_index = TOKENS["<video>"]


def save_tokenizer(folder: Path, tokenizer_class: str, named: dict[str, str]) -> None:
    """One token a byte; the special tokens added, as `tokenizer.json` with its older two companions.

    `named`: tokens that the tokenizer is to have as attributes.
    """
    vocabulary = {byte: TOKENS[byte] for byte in _BYTES}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {str(TOKENS[token]): _added(token) for token in SPECIAL}
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": tokenizer_class, "added_tokens_decoder": added, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "model_max_length": 4096, "additional_special_tokens": list(SPECIAL[1:]),
        "model_input_names": ["input_ids", "attention_mask"], **({"extra_special_tokens": named} if named else {}),
    })  # fmt: skip


def _added(token: str) -> dict[str, Any]:
    return {
        "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True,
    }  # fmt: skip


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
