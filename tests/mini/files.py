"""Small ONNX and GGUF files, written by the formats' own rules, and a small random model of `mini`'s kind."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

from dart_lab.mini import configs
from dart_lab.mini.convert import language_state, vision_state
from dart_lab.mini.folder import whole_state, write_folder
from dart_lab.mini.gguf import read_gguf
from dart_lab.mini.onnx import read_onnx
from dart_lab.mini.tokenizer import build_tokenizer

VISION_WIDTH, VISION_LAYERS, TABLE = 24, 3, 5
WIDTH, FF, LAYERS, HEADS, KV_HEADS = 32, 64, 3, 4, 2
GRID = 4
TOKENS = [f"<|special {i}|>" for i in range(17)] + sorted(ByteLevel.alphabet()) + ["is", "re", "red"]
TOKENS[:3] = [configs.PAD, configs.START, configs.END]
MERGES = ["i s", "r e", "re d"]
BLOCKS = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8}


def varint(value: int) -> bytes:
    out = b""
    while True:
        value, low = value >> 7, value & 127
        out += bytes([low | (128 if value else 0)])
        if not value:
            return out


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def onnx_tensor(name: str, array: np.ndarray, *, packed: bool = False) -> bytes:
    dims = b"".join(varint(n) for n in array.shape)
    shape = message(1, dims) if packed else b"".join(varint(8) + varint(n) for n in array.shape)
    kind = {"float32": 1, "int64": 7}[array.dtype.name]
    return shape + varint(16) + varint(kind) + message(8, name.encode()) + message(9, array.tobytes())


def onnx_node(operation: str, inputs: list[str], output: str) -> bytes:
    names = b"".join(message(1, name.encode()) for name in inputs)
    return names + message(2, output.encode()) + message(4, operation.encode())


def onnx_file(tensors: Mapping[str, np.ndarray], nodes: list[tuple[str, list[str], str]]) -> bytes:
    graph = b"".join(message(1, onnx_node(*node)) for node in nodes)
    graph += b"".join(message(5, onnx_tensor(name, array)) for name, array in tensors.items())
    return varint(8) + varint(8) + message(2, b"pytorch") + message(7, graph)  # version, producer, graph


def vision_onnx(rng: np.random.Generator) -> tuple[bytes, dict[str, np.ndarray]]:
    """A backbone as torch exports it, matrices turned and nameless, and its parts under the hub's names."""
    w, hub = VISION_WIDTH, {}

    def put(name: str, *shape: int) -> None:
        hub[name] = (rng.normal(size=shape) * 0.2).astype(np.float32)

    put("embeddings.cls_token", 1, 1, w)
    put("embeddings.patch_embeddings.projection.weight", w, 3, configs.PATCH, configs.PATCH)
    put("embeddings.patch_embeddings.projection.bias", w)
    linear = {}
    for layer in range(VISION_LAYERS):
        stem = f"encoder.layer.{layer}."
        parts = {"attention.attention.query": (w, w), "attention.attention.key": (w, w),
                 "attention.attention.value": (w, w), "attention.output.dense": (w, w),
                 "mlp.fc1": (4 * w, w), "mlp.fc2": (w, 4 * w)}  # fmt: skip
        for part, shape in parts.items():
            put(f"{stem}{part}.bias", shape[0])
            linear[stem + part] = (rng.normal(size=shape) * 0.3).astype(np.float32)
        for norm in ("norm1", "norm2"):
            put(f"{stem}{norm}.weight", w)
            put(f"{stem}{norm}.bias", w)
        for scale in ("layer_scale1", "layer_scale2"):
            put(f"{stem}{scale}.lambda1", w)
    put("layernorm.weight", w)
    put("layernorm.bias", w)
    tensors = {f"backbone.{name}": array for name, array in hub.items()}
    tensors["decoder.final_conv.bias"] = np.ones(1, dtype=np.float32)
    tensors["shape"] = np.array([1, -1], dtype=np.int64)
    positions = (rng.normal(size=(1, 1 + TABLE**2, w)) * 0.2).astype(np.float32)
    tensors["onnx::Concat_1"] = np.ascontiguousarray(positions[:, :1])
    tensors["onnx::Reshape_2"] = np.ascontiguousarray(positions[:, 1:])
    nodes: list[tuple[str, list[str], str]] = []
    for number, (name, matrix) in enumerate(linear.items()):
        tensors[f"onnx::MatMul_{number}"] = np.ascontiguousarray(matrix.T)
        nodes.append(("MatMul", [f"state {number}", f"onnx::MatMul_{number}"], f"product {number}"))
        ends = [f"backbone.{name}.bias", f"product {number}"]
        nodes.append(("Add", ends if number % 2 else ends[::-1], f"state {number + 1}"))
        hub[f"{name}.weight"] = matrix
    hub["positions"] = positions
    return onnx_file(tensors, nodes), hub


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value: Any) -> bytes:
    """Type and value; lists of whole numbers and of texts, texts, truth, whole numbers and fractions."""
    if isinstance(value, list):
        body = [gguf_value(item) for item in value]
        return struct.pack("<I", 9) + body[0][:4] + struct.pack("<Q", len(value)) + b"".join(item[4:] for item in body)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    return struct.pack("<Ii", 5, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def quantised(array: np.ndarray, kind: str) -> bytes:
    """Bytes of an array in a GGUF type; the nearest that the type can hold."""
    if kind in ("F32", "F16"):
        return array.astype("<f4" if kind == "F32" else "<f2").tobytes()
    out = b""
    for block in array.reshape(-1, 32):
        if kind == "Q8_0":
            scale = np.float16(np.abs(block).max() / 127)
            out += scale.tobytes() + np.round(block / np.float32(scale)).clip(-127, 127).astype(np.int8).tobytes()
        else:
            scale, least = np.float16((block.max() - block.min()) / 15), np.float16(block.min())
            steps = np.round((block - np.float32(least)) / np.float32(scale)).clip(0, 15).astype(np.uint8)
            out += (
                scale.tobytes()
                + least.tobytes()
                + bytes(int(a) | int(b) << 4 for a, b in zip(*steps.reshape(2, 16), strict=True))
            )
    return out


def gguf_file(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in metadata.items())
    data = b""
    for name, (array, kind) in tensors.items():
        shape = struct.pack(f"<{array.ndim}Q", *array.shape[::-1])
        head += gguf_string(name) + struct.pack("<I", array.ndim) + shape + struct.pack("<IQ", BLOCKS[kind], len(data))
        data += quantised(array, kind)
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotated halves as GGUF keeps them: row 2 i of a head is row i of its first half."""
    width = len(rows) // heads
    order = [head * width + (i // 2 + (i % 2) * width // 2) for head in range(heads) for i in range(width)]
    return rows[order]


def language_gguf(rng: np.random.Generator) -> tuple[bytes, dict[str, np.ndarray]]:
    """A small Llama as GGUF, and its float32 weights under transformers' names."""
    head = WIDTH // HEADS
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (KV_HEADS * head, WIDTH), "attn_v": (KV_HEADS * head, WIDTH),
              "attn_output": (WIDTH, WIDTH), "ffn_gate": (FF, WIDTH), "ffn_up": (FF, WIDTH),
              "ffn_down": (WIDTH, FF)}  # fmt: skip
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}  # fmt: skip
    hub = {"embed_tokens.weight": rng.normal(size=(len(TOKENS), WIDTH)), "norm.weight": rng.normal(size=WIDTH)}
    tensors = {
        "token_embd.weight": (hub["embed_tokens.weight"], "F32"),
        "output_norm.weight": (hub["norm.weight"], "F32"),
    }
    for layer in range(LAYERS):
        for norm, name in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            hub[f"layers.{layer}.{name}.weight"] = rng.normal(size=WIDTH)
            tensors[f"blk.{layer}.{norm}.weight"] = (hub[f"layers.{layer}.{name}.weight"], "F32")
        for part, shape in shapes.items():
            matrix = rng.normal(size=shape) * 0.3
            hub[f"layers.{layer}.{names[part]}.weight"] = matrix
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
            tensors[f"blk.{layer}.{part}.weight"] = (interleaved(matrix, heads) if heads else matrix, "F32")
    metadata = {
        "general.architecture": "llama", "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.rope.freq_base": 1e5, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3] * 17 + [1] * (len(TOKENS) - 17), "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    return gguf_file(metadata, tensors), {name: array.astype(np.float32) for name, array in hub.items()}


def small_folder(folder: Path, trained: Mapping[str, torch.Tensor], seed: int = 0) -> Path:
    """A model of `mini`'s kind, small and random, put together as the real one is."""
    rng = np.random.default_rng(seed)
    gguf = read_gguf(language_gguf(rng)[0])
    vision = vision_state(read_onnx(vision_onnx(rng)[0]), GRID)
    write_folder(folder, whole_state(vision, language_state(gguf), trained), build_tokenizer(gguf.metadata))
    return shrink(folder)


def shrink(folder: Path) -> Path:
    """Write the small model's sizes into the configuration of a folder."""
    config = json.loads((folder / "config.json").read_text())
    side = GRID * configs.PATCH
    config["vision_config"] |= {
        "hidden_size": VISION_WIDTH, "num_hidden_layers": VISION_LAYERS, "num_attention_heads": 3, "image_size": side,
    }  # fmt: skip
    config["text_config"] |= {
        "vocab_size": len(TOKENS), "hidden_size": WIDTH, "intermediate_size": FF, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    pictures = json.loads((folder / "preprocessor_config.json").read_text())
    pictures |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return folder


def small_trained(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random projector and adapters for the small model."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * 0.3

    trained = {
        "projector.linear_1.weight": normal(WIDTH, VISION_WIDTH), "projector.linear_1.bias": normal(WIDTH),
        "projector.linear_2.weight": normal(WIDTH, WIDTH), "projector.linear_2.bias": normal(WIDTH),
    }  # fmt: skip
    for layer in range(LAYERS):
        for part, rows in (("q", WIDTH), ("k", WIDTH // 2), ("v", WIDTH // 2), ("o", WIDTH)):
            stem = f"adapters.layers/{layer}/self_attn/{part}_proj"
            trained |= {f"{stem}.lora_a": normal(8, WIDTH), f"{stem}.lora_b": normal(rows, 8)}
    return trained
