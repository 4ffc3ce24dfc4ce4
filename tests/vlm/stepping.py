"""Greedy decoding by hand, so that every step's logits and cache lengths can be looked at, on any supported release."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def cache_name(model: Any) -> str:
    """The keyword under which a model's `forward` takes its KV cache in this release."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_from(output: Any) -> Any:
    """The KV cache that a forward pass returned."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def lengths(cache: Any) -> list[int]:
    """Columns held by each layer."""
    return [int(layer.get_seq_length()) for layer in cache.layers]


@dataclass
class Steps:
    """`logits` `(batch, vocabulary)` of every step, the first of them the prompt's; `tokens` `(batch, steps)`."""

    prompt: Tensor
    logits: list[Tensor]
    tokens: Tensor
    lengths: list[list[int]]
    cache: Any


@torch.no_grad()
def decode(model: Any, inputs: dict[str, Any], steps: int, *, forced: Tensor | None = None) -> Steps:
    """Run the prompt, then feed `steps` tokens, greedily or as `forced` `(batch, steps)` says, on the cache."""
    mask: Tensor | None = inputs.get("attention_mask")
    out = model(**{**inputs, "use_cache": True})
    cache, logits, fed = cache_from(out), [out.logits[:, -1]], []
    held = [lengths(cache)]
    for step in range(steps):
        token = logits[-1].argmax(dim=-1, keepdim=True) if forced is None else forced[:, step : step + 1]
        fed.append(token)
        more: dict[str, Any] = {}
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            more = {"attention_mask": mask, "position_ids": mask.sum(dim=1, keepdim=True) - 1}
        step_out = model(input_ids=token, use_cache=True, **{cache_name(model): cache}, **more)
        cache = cache_from(step_out)
        logits.append(step_out.logits[:, -1])
        held.append(lengths(cache))
    return Steps(out.logits, logits, torch.cat(fed, dim=1) if fed else torch.empty(0), held, cache)


@torch.no_grad()
def recompute(model: Any, embeds: Tensor, steps: int) -> Steps:
    """The same from input embeddings without a cache: the whole sequence runs again at every step."""
    table, logits, fed = model.get_input_embeddings(), [], []
    prompt = None
    for _ in range(steps + 1):
        out = model(inputs_embeds=embeds, use_cache=False)
        prompt = out.logits if prompt is None else prompt
        logits.append(out.logits[:, -1])
        fed.append(logits[-1].argmax(dim=-1, keepdim=True))
        embeds = torch.cat([embeds, table(fed[-1])], dim=1)
    return Steps(prompt, logits, torch.cat(fed[:-1], dim=1), [], None)
