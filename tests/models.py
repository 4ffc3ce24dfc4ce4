"""Small random models of the real classes, in the hub's own format, for tests that need numbers but no knowledge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<image>"]
WORDS = "user : assistant ? what shape is the red blue circle square where how many are there left right yes no".split()
PATCH = 14
CHAT_TEMPLATE = (
    "<bos> user : {% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word; unknown words become <unk>; pads on the left."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"}, padding_side="left", model_max_length=4096,
        model_input_names=["input_ids", "attention_mask"],
    )


def llava_processor(*, grid: int = 6, chat_template: str | None = CHAT_TEMPLATE) -> LlavaProcessor:
    """A processor whose pictures become `grid` × `grid` visual tokens."""
    size = grid * PATCH
    pictures = CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return LlavaProcessor(
        image_processor=pictures, tokenizer=word_tokenizer(), patch_size=PATCH, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", image_token="<image>", chat_template=chat_template,
    )


def llava_model(
    *, grid: int = 6, layers: int = 4, hidden: int = 32, heads: int = 4, kv_heads: int | None = None,
    vision_layers: int = 2, seed: int = 0, attention: str = "sdpa", **text: Any,
) -> LlavaForConditionalGeneration:
    """A LLaVA with random float32 weights large enough that attention is not uniform.

    `kv_heads` below `heads` gives grouped-query attention; `text` are further fields of the Llama config.
    """
    vision_config = CLIPVisionConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=vision_layers, num_attention_heads=heads,
        image_size=grid * PATCH, patch_size=PATCH, initializer_range=0.2,
    )
    text_config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads or heads,
        initializer_range=0.2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2, **text,
    )
    config = LlavaConfig(
        vision_config=vision_config, text_config=text_config, image_token_index=SPECIAL.index("<image>"),
        vision_feature_layer=-2, vision_feature_select_strategy="default",
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    model.set_attn_implementation(attention)
    return model.eval()


def tiny_llava(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, **sizes: Any) -> Path:
    """Save a random LLaVA and its processor under `folder` as the hub would, and return the folder.

    `sizes` go to `llava_model` (grid, layers, hidden, heads, kv_heads, seed …).
    """
    folder.mkdir(parents=True, exist_ok=True)
    llava_model(**sizes).save_pretrained(folder)
    llava_processor(grid=sizes.get("grid", 6), chat_template=chat_template).save_pretrained(folder)
    return folder
