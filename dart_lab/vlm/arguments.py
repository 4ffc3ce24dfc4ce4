"""A decoder layer's keyword arguments for a sequence that is shorter than the one its model prepared them for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabWarning
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import PAD
from dart_lab.vlm import compat, ragged
from dart_lab.vlm.cuts import Cut, gather_along, select_positions
from dart_lab.vlm.passes import Pass


def move_positions(
    text: Any, now: Pass, cut: Cut | None, shift: Tensor | None, kwargs: dict[str, Any], states: Tensor, key: Any
) -> None:
    """Give the slots their rotary positions: those of their tokens, or numbered without gaps.

    Args:
        text: the stack of decoder layers, which turns positions into (cos, sin).
        now, cut: the pass, and the cut that the layer runs under.
        shift: `(batch,)`, how far positions lag behind since earlier passes; None: not at all.
        kwargs: the layer's keyword arguments, changed in place.
        states: `(batch, m, channels)`, what the layer receives.
        key: what the result may be remembered under for other layers of this pass.
    """
    if cut is not None and not cut.compact:
        rows = cut.rows.to(states.device)
        for name in ("position_embeddings", "position_ids"):
            if kwargs.get(name) is not None:
                kwargs[name] = once(now, (name, key), kwargs[name], lambda value: select_positions(value, rows))
    elif cut is not None or shift is not None:
        moved = once(now, ("moved", key), kwargs["position_ids"], lambda value: renumbered(value, cut, shift))
        kwargs["position_ids"] = moved
        kwargs["position_embeddings"] = once(
            now, ("turned", key), moved, lambda value: text.rotary_emb(states, value)
        )


def renumbers(model: Any, part: Pruner) -> bool:
    """Whether the tokens that a method leaves are renumbered without gaps.

    Positions of several axes (M-RoPE) have no order to renumber: there tokens keep their original ones, and a warning
    says so.
    """
    if part.positions != "compact":
        return False
    if not compat.has_position_axes(compat.text_model(model)):
        return True
    warnings.warn(
        f"{part.name}: positions of several axes (M-RoPE) have no order to renumber, so tokens keep their original "
        "positions",
        DartLabWarning, stacklevel=2,
    )  # fmt: skip
    return False


def shorten_mask(
    now: Pass,
    cut: Cut | None,
    columns: Tensor,
    hollow: bool,
    kwargs: dict[str, Any],
    states: Tensor,
    key: Any,
    *,
    width: int | None,
    backend: str,
) -> None:
    """Rewrite a layer's mask to the rows and columns that it has, and where it writes in a static cache.

    `columns` `(batch, keys)` are those that it holds after the pass, `width` the slots of a static cache; for the other
    arguments see `move_positions`.
    """
    device = states.device
    rows = None if cut is None else cut.rows.to(device)
    kwargs["attention_mask"] = once(
        now,
        ("mask", key),
        kwargs.get("attention_mask"),
        lambda mask: ragged.short_mask(
            mask,
            rows=rows,
            columns=columns,
            hollow=hollow,
            ordered=cut is None or cut.ordered,
            past=now.past,
            length=now.length,
            attended=now.attended,
            width=width,
            backend=backend,
            dtype=states.dtype,
        ),
    )
    if kwargs.get("cache_position") is not None:  # releases before 5.4: where a static cache writes
        kwargs["cache_position"] = torch.arange(columns.shape[1] - states.shape[1], columns.shape[1], device=device)


def once(now: Pass, key: Any, value: Any, compute: Callable[[Any], Any]) -> Any:
    """`compute(value)`, remembered for the layers that get the same `value` in this pass."""
    stored = now.memo.get(key)
    if stored is None or stored[0] is not value:
        stored = now.memo[key] = (value, compute(value))
    return stored[1]


def columns_after(now: Pass, cut: Cut | None, known: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """`(batch, keys)` columns that a layer holds after this pass, -1 for empty slots."""
    if known is None:
        known = torch.arange(now.past, device=device).expand(batch, -1)
    if cut is None:
        new = torch.arange(now.past, now.total, device=device).expand(batch, -1)
    else:
        rows = cut.rows.to(device)
        new = torch.where(rows == PAD, PAD, rows + now.past)
    return torch.cat([known.to(device), new], dim=1)


def renumbered(ids: Tensor, cut: Cut | None, shift: Tensor | None) -> Tensor:
    """Renumber position ids `(batch | 1, n)`: those of the first m tokens, less what earlier passes lost."""
    if cut is not None:
        slot = torch.arange(cut.rows.shape[1], device=ids.device) - (cut.rows == PAD).sum(dim=1, keepdim=True)
        ids = gather_along(ids, slot, dim=-1)
    return ids if shift is None else ids - shift[:, None].to(ids.device)
