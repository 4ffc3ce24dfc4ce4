"""A decoder written out by hand, without cache, hooks or this package, computes what the pruned model computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dart_lab.pruners import DART, Pruner
from dart_lab.vlm.insert import prune
from tests.vlm.common import IMAGE, ONE, THREE, Uneven, alone, batch, in_float64, small_llava
from tests.vlm.stepping import decode


def llama(text: Any, embeds: Tensor, positions: Tensor, stays: Tensor, first_short: int) -> Tensor:
    """One sequence `(n, channels)` → its last state; tokens outside `stays` end before layer `first_short`."""
    states, config = embeds, text.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    for index, layer in enumerate(text.layers):
        if index == first_short:
            states, positions = states[stays], positions[stays]
        angle = positions[:, None].float() * 10000.0 ** (-torch.arange(0, width, 2).float() / width)
        cos, sin = (f(torch.cat([angle, angle], dim=1)).to(states.dtype)[:, None] for f in (torch.cos, torch.sin))
        normed = rms_norm(states, layer.input_layernorm)
        attention = layer.self_attn
        q, k = (
            rotate(projection(normed).view(len(states), count, width), cos, sin)
            for projection, count in ((attention.q_proj, heads), (attention.k_proj, kv_heads))
        )
        v = attention.v_proj(normed).view(len(states), kv_heads, width)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
        future = torch.ones(len(states), len(states), dtype=torch.bool).triu(1)
        weights = logits.masked_fill(future, -math.inf).softmax(dim=-1)
        states = states + attention.o_proj(torch.einsum("hqk,khd->qhd", weights, v).reshape(len(states), -1))
        normed = rms_norm(states, layer.post_attention_layernorm)
        mlp = layer.mlp
        states = states + mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    return rms_norm(states, text.norm)[-1]


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    return norm.weight * x / (x.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon).sqrt()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def input_embeddings(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the text model receives for these prompts."""
    seen: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0][0]


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "pruner", [DART(keep=5), Uneven(layer=1), Uneven(layer=3)], ids=lambda p: f"{p.name}-{p.layer}"
)
@torch.no_grad()
def test_prompt_and_eight_steps(
    pruner: Pruner, kv_heads: int, images: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_float64(small_llava(kv_heads=kv_heads), monkeypatch)
    inputs = batch(images)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    with prune(model, pruner) as run:
        steps = decode(model, inputs, 8)
    for row, kept in enumerate(run.kept):
        single = alone(inputs, images, row)
        visual = (single["input_ids"][0] == IMAGE).nonzero()[:, 0].numpy()
        embeds = input_embeddings(model, single)
        for step, logits in enumerate(steps.logits):
            tokens = model.get_input_embeddings()(steps.tokens[row, :step])
            whole = torch.cat([embeds, tokens])
            stays = torch.ones(len(whole), dtype=torch.bool)
            stays[torch.from_numpy(np.delete(visual, kept))] = False
            last = llama(model.model.language_model, whole, torch.arange(len(whole)), stays, pruner.layer)
            torch.testing.assert_close(logits[row], model.lm_head(last), atol=1e-10, rtol=0)
