"""Mask tokens from layer K on instead of dropping them: slow, plain, and the oracle that dropping is held against.

Nothing is shortened: every layer ≥ K gets an explicit mask in which the chosen columns are closed to every query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.vlm import compat
from dart_lab.vlm.locate import model_of


@contextmanager
def mask_drop(model: Any, hidden: Tensor, *, layer: int) -> Iterator[None]:
    """While the block runs, hide `hidden` columns from every query in decoder layers ≥ `layer`.

    Queries of hidden tokens still run; nobody sees them. Works in prefill and in every decode step, with or without
    cache.

    Args:
        model: a Hugging Face model object, or a `VLM`.
        hidden: `(batch, prompt)` bool, True where a token of the prompt is to be hidden.
        layer: K, at least 1.

    Raises:
        DartLabError: a layer that the model does not have.
    """
    model = model_of(model)
    text = compat.text_model(model)
    if not 0 <= layer < len(text.layers):
        raise DartLabError(f"layer={layer}, but the model has {len(text.layers)} decoder layers")
    state: dict[str, Any] = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state["past"] = compat.cached_length(kwargs)
        state["mask"] = kwargs.get("attention_mask")

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        total = state["past"] + states.shape[1]
        closed = torch.nn.functional.pad(hidden.to(states.device), (0, total - hidden.shape[1]))
        allowed = visible(states.shape[0], state["past"], total, compat.real_tokens(state["mask"], total), closed)
        width = compat.fixed_length(compat.cache_layer(compat.cache_of(kwargs), layer))
        allowed = torch.nn.functional.pad(allowed, (0, 0 if width is None else width - total))
        return args, {
            **kwargs,
            "attention_mask": compat.mask_from_allowed(allowed, compat.backend_of(text), states.dtype),
        }

    undo: list[Callable[[], None]] = [text.register_forward_pre_hook(begin, with_kwargs=True).remove]
    undo += [block.register_forward_pre_hook(before, with_kwargs=True).remove for block in text.layers[layer:]]
    try:
        yield
    finally:
        for remove in undo:
            remove()


def visible(batch: int, past: int, total: int, attended: Tensor | None, closed: Tensor) -> Tensor:
    """`(batch, 1, total − past, total)` bool: causal, real, and not `closed` `(batch, total)`.

    A query that would see nothing (padding) sees itself, so that its softmax stays finite.
    """
    device = closed.device
    column = torch.arange(total, device=device)
    query = column[past:, None]
    allowed = (column <= query)[None] & ~closed[:, None, :]
    if isinstance(attended, Tensor) and attended.dim() == 2:
        allowed = allowed & attended.bool()[:, None, :total].to(device)
    alone = ~allowed.any(dim=2, keepdim=True) & (column == query)
    return (allowed | alone).expand(batch, -1, -1)[:, None]
