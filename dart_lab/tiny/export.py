"""Write a trained network as a folder in the hub's own LLaVA format: ``python -m dart_lab.tiny.export RUN FOLDER``.

The folder loads with stock transformers: weights under the names of llava-hf checkpoints, fp16 safetensors, a WordPiece
tokenizer, the processor with its chat template.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dart_lab.tasks import scene
from dart_lab.tiny import words
from dart_lab.tiny.network import TinyNetwork
from dart_lab.tiny.optimizer import FlatOptimizer
from dart_lab.tiny.recipe import TINY, Recipe
from dart_lab.tiny.train import build, resume
from dart_lab.tiny.vision import Shape

ANSWER_TOKENS = 4  # longest answer and its end, with one to spare
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message['role'] }} :"
    "{% if message['content'] is string %} {{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %} <image>{% elif part['type'] == 'text' %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% if message['role'] == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} assistant :{% endif %}"
)


def model_config(shape: Shape) -> dict[str, Any]:
    """``config.json``: only fields that transformers 4.57 and 5 both know."""
    ids = words.IDS
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": ids[words.IMAGE],
        "image_token_id": ids[words.IMAGE],
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_seq_length": shape.grid**2,
        "tie_word_embeddings": False,
        "pad_token_id": ids[words.PAD],
        "bos_token_id": ids[words.BOS],
        "eos_token_id": ids[words.EOS],
        "torch_dtype": "float16",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": shape.width,
            "intermediate_size": shape.vision_ff,
            "num_hidden_layers": shape.vision_layers,
            "num_attention_heads": shape.heads,
            "num_channels": 3,
            "image_size": scene.CANVAS,
            "patch_size": shape.patch,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "projection_dim": shape.width,
        },
        "text_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": len(words.VOCABULARY),
            "hidden_size": shape.width,
            "intermediate_size": shape.ff,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "head_dim": shape.head_width,
            "hidden_act": "silu",
            "max_position_embeddings": 1024,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "pad_token_id": ids[words.PAD],
            "bos_token_id": ids[words.BOS],
            "eos_token_id": ids[words.EOS],
        },
    }


def generation_config() -> dict[str, Any]:
    """``generation_config.json``: greedy and short."""
    ids = words.IDS
    return {
        "bos_token_id": ids[words.BOS],
        "eos_token_id": ids[words.EOS],
        "pad_token_id": ids[words.PAD],
        "do_sample": False,
        "max_new_tokens": ANSWER_TOKENS,
    }


def processor_configs() -> dict[str, dict[str, Any]]:
    """Processor, image processor and tokenizer configurations, by file name."""
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": scene.CANVAS},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": scene.CANVAS, "width": scene.CANVAS},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": words.IMAGE,
        "patch_size": TINY.shape.patch,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "LlavaProcessor",
        "model_max_length": 1024,
        "padding_side": "left",
        "bos_token": words.BOS,
        "eos_token": words.EOS,
        "pad_token": words.PAD,
        "unk_token": words.UNKNOWN,
        "additional_special_tokens": [words.IMAGE],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {
        "preprocessor_config.json": {**image_processor, "processor_class": "LlavaProcessor"},
        "processor_config.json": processor,
        "tokenizer_config.json": tokenizer,
        "chat_template.json": {"chat_template": TEMPLATE},
    }


def write_tokenizer(path: Path) -> None:
    """Write ``tokenizer.json``: lower case, split at blanks and punctuation, then WordPiece over the known words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(words.IDS, unk_token=words.UNKNOWN, max_input_chars_per_word=40))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in words.SPECIAL])
    tokenizer.save(str(path))


def write_folder(network: TinyNetwork, folder: Path) -> None:
    """Write all files of the checkpoint; every file is written beside its place and moved there."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": model_config(network.shape), "generation_config.json": generation_config()}
    for name, content in {**files, **processor_configs()}.items():
        partial = folder / (name + ".part")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / name)
    partial = folder / "tokenizer.json.part"
    write_tokenizer(partial)
    os.replace(partial, folder / "tokenizer.json")
    partial = folder / "model.safetensors.part"
    weights = {name: tensor.to(torch.float16).contiguous() for name, tensor in network.state_dict().items()}
    save_file(weights, partial, {"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")


def trained(run: Path, recipe: Recipe, seed: int) -> TinyNetwork:
    """The network of a training run, as of its last checkpoint; freshly initialised where there is none."""
    network, modules = build(recipe, seed)
    resume(run, FlatOptimizer(modules, recipe.weight_decay, recipe.clip), seed)
    return network.eval()


def main() -> None:
    """Command line of the export."""
    parser = argparse.ArgumentParser(description="Export a training run of tiny in the hub's format.")
    parser.add_argument("run", type=Path, help="folder of the training run")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default 0)")
    arguments = parser.parse_args()
    write_folder(trained(arguments.run, TINY, arguments.seed), arguments.folder)


if __name__ == "__main__":
    main()
