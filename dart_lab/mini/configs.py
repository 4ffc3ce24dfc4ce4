"""The configuration files of `mini`'s folder: only fields that transformers 4.57 and 5 both know."""

from __future__ import annotations

from typing import Any

SIDE, PATCH = 336, 14  # of the picture and of a patch, pixels
GRID = SIDE // PATCH
IMAGE_TOKEN = "<image>"
IMAGE_ID = 16  # a reserved token of the language model that its training never used
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ANSWER_TOKENS = 16  # longest answer by default
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the vision tower's pictures
WIDTH, VISION_WIDTH = 576, 384
CONTEXT = 8192
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_VISION = {
    "model_type": "dinov2",
    "hidden_size": VISION_WIDTH,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "num_channels": 3,
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "layerscale_value": 1.0,
    "qkv_bias": True,
}
_TEXT = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": WIDTH,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def model_config() -> dict[str, Any]:
    """``config.json``."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_ID,
        "image_token_id": IMAGE_ID,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_seq_length": GRID**2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "vision_config": dict(_VISION),
        "text_config": dict(_TEXT),
    }


def other_configs() -> dict[str, dict[str, Any]]:
    """Configurations of generation, processor, image processor, tokenizer and chat template, by file name."""
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": SIDE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "LlavaProcessor",
        "model_max_length": CONTEXT,
        "padding_side": "left",
        "bos_token": START,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": PAD,
        "additional_special_tokens": [IMAGE_TOKEN],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    generation = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": ANSWER_TOKENS,
    }
    return {
        "generation_config.json": generation,
        "preprocessor_config.json": image_processor,
        "processor_config.json": processor,
        "tokenizer_config.json": tokenizer,
        "chat_template.json": {"chat_template": TEMPLATE},
    }
