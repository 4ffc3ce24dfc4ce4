"""A decoder and a vision tower as plain loops over one sequence, on a model's weights: no hooks, no masks, no batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.vlm.common import IMAGE
from tests.vlm.test_by_hand import input_embeddings as input_embeddings
from tests.vlm.test_by_hand import rms_norm, rotate


@dataclass
class Decoder:
    """Layers of a text model over one sequence; `keys` and `values` hold `(slots, heads, width)` for every layer.

    `received`: attention that each slot got in the last call, mean over heads, summed over queries, for every layer.
    """

    text: Any
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)

    def run(self, states: Tensor, positions: Tensor, layers: range) -> Tensor:
        """`(n, channels)` at `positions` `(n,)`, behind what the caches of these layers hold."""
        config = self.text.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = config.hidden_size // heads
        angle = positions[:, None].float() * 10000.0 ** (-torch.arange(0, width, 2).float() / width)
        cos, sin = (f(torch.cat([angle, angle], dim=1))[:, None] for f in (torch.cos, torch.sin))
        for index in layers:
            layer = self.text.layers[index]
            normed, own = rms_norm(states, layer.input_layernorm), layer.self_attn
            q = rotate(own.q_proj(normed).view(len(states), heads, width), cos, sin)
            k = rotate(own.k_proj(normed).view(len(states), kv_heads, width), cos, sin)
            v = own.v_proj(normed).view(len(states), kv_heads, width)
            k, v = torch.cat([self.keys.get(index, k[:0]), k]), torch.cat([self.values.get(index, v[:0]), v])
            self.keys[index], self.values[index] = k, v
            k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
            logits = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
            future = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
            weights = logits.masked_fill(future, -math.inf).softmax(dim=-1)
            self.received[index] = weights.mean(dim=0).sum(dim=0)
            states = states + own.o_proj(torch.einsum("hqk,khd->qhd", weights, v).reshape(len(states), -1))
            normed, mlp = rms_norm(states, layer.post_attention_layernorm), layer.mlp
            states = states + mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        return states

    def last(self, model: Any, states: Tensor) -> Tensor:
        """Logits of the last token."""
        out: Tensor = model.lm_head(rms_norm(states, self.text.norm)[-1])
        return out


def tower_of(model: Any) -> Any:
    """CLIP's embeddings, norm and blocks, wherever this release has them."""
    tower = model.model.vision_tower
    return getattr(tower, "vision_model", tower)


def clip_attention(block: Any, states: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """States `(n, channels)` after attention and its residual, and the keys `(n, head_dim)`, mean over heads.

    `bias` `(n,)` is added to the logits of every key.
    """
    own = block.self_attn
    x = block.layer_norm1(states)
    heads = own.num_heads
    q, k, v = (part(x).view(len(x), heads, -1) for part in (own.q_proj, own.k_proj, own.v_proj))
    logits = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    if bias is not None:
        logits = logits + bias
    out = torch.einsum("hqk,khd->qhd", logits.softmax(dim=-1), v).reshape(len(x), -1)
    return states + own.out_proj(out), k.mean(dim=1)


def clip_mlp(block: Any, states: Tensor) -> Tensor:
    out: Tensor = states + block.mlp(block.layer_norm2(states))
    return out


def patches_of(model: Any, pixels: Tensor) -> Tensor:
    """One picture `(3, h, w)` → what the first block gets, class token first: `(1 + patches, channels)`."""
    tower = tower_of(model)
    out: Tensor = tower.pre_layrnorm(tower.embeddings(pixels[None]))[0]
    return out


def prompt_with(model: Any, ids: Tensor, visual: list[Tensor]) -> Tensor:
    """Input embeddings of a prompt whose pictures are these tokens `(m, channels)`, in order of the pictures."""
    table, parts, at, picture = model.get_input_embeddings(), [], 0, 0
    per_picture = int((ids == IMAGE).sum()) // len(visual)
    while at < len(ids):
        if ids[at] == IMAGE:
            parts.append(visual[picture])
            at, picture = at + per_picture, picture + 1
        else:
            parts.append(table(ids[at : at + 1]))
            at += 1
    return torch.cat(parts)
