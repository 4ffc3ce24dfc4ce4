"""KV caches whose deeper layers are shorter: which column of the prompt each cached slot holds.

Layers < K cache every token, layers ≥ K only the kept ones. The remembered columns live on the cache layer itself, so
that they follow the cache through beam search, copies, cropping and reset.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.reduction import PAD
from dart_lab.vlm import compat


def columns_of(layer: Any | None, total: int) -> Tensor | None:
    """Columns held by a shortened cache layer, `(batch, slots)` int64 with -1 for empty slots; None if it is not
    shortened.

    `total` is the number of columns an unshortened layer holds now; what was appended since the prompt follows in
    order.
    """
    columns: Tensor | None = getattr(layer, "kept_columns", None)
    if columns is None or layer is None:
        return None
    later = torch.arange(layer.kept_total, total, device=columns.device).expand(columns.shape[0], -1)
    return torch.cat([columns, later], dim=1)


def has_empty_slots(layer: Any | None) -> bool:
    """True if a shortened cache layer has slots that hold nothing (rows of the batch that kept fewer tokens)."""
    return bool(getattr(layer, "kept_hollow", False))


def shift_of(layer: Any | None) -> Tensor | None:
    """`(batch,)` int64: how far later tokens move forward on a layer with renumbered positions; None if they do not."""
    shift: Tensor | None = getattr(layer, "kept_shift", None)
    return shift


def remember(layer: Any, columns: Tensor, total: int, hollow: bool, shift: Tensor | None = None) -> None:
    """Note on a cache layer which columns its slots hold, out of `total` so far.

    `hollow`: some slots hold nothing. `shift` `(batch,)`: later tokens' positions are that much smaller (renumbering).
    """
    if not hasattr(type(layer), "kept_columns"):
        layer.__class__ = _ragged(type(layer))  # type: ignore[arg-type]
    layer.kept_columns, layer.kept_total, layer.kept_hollow, layer.kept_shift = columns, total, hollow, shift


@cache
def _ragged(base: Any) -> Any:
    """A subclass of a cache layer that moves the remembered columns wherever the cached keys move."""

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        base.reorder_cache(self, beam_idx)
        _select(self, beam_idx)

    def batch_select_indices(self: Any, indices: Tensor) -> None:
        base.batch_select_indices(self, indices)
        _select(self, indices)

    def batch_repeat_interleave(self: Any, repeats: int) -> None:
        base.batch_repeat_interleave(self, repeats)
        if self.kept_columns is not None:
            self.kept_columns = self.kept_columns.repeat_interleave(repeats, dim=0)
        if self.kept_shift is not None:
            self.kept_shift = self.kept_shift.repeat_interleave(repeats, dim=0)

    def reset(self: Any) -> None:
        base.reset(self)
        self.kept_columns, self.kept_hollow, self.kept_shift = None, False, None

    def crop(self: Any, amount: int) -> None:
        if self.kept_columns is None:
            base.crop(self, amount)
            return
        slots = int(self.get_seq_length())
        appended = slots - self.kept_columns.shape[1]
        remove = -amount if amount <= 0 else max(self.kept_total + appended - amount, 0)
        if remove > appended:
            raise DartLabError(
                f"cropping {remove} columns would cut into the pruned prompt: only {appended} columns came later; "
                "run the prompt again instead"
            )
        if remove:
            base.crop(self, -remove)

    methods: dict[str, Any] = {
        "reorder_cache": reorder_cache,
        "reset": reset,
        "kept_columns": None,
        "kept_total": 0,
        "kept_hollow": False,
        "kept_shift": None,
    }
    for method in (batch_select_indices, batch_repeat_interleave, crop):
        if hasattr(base, method.__name__):
            methods[method.__name__] = method
    return type(base.__name__, (base,), methods)


def _select(layer: Any, indices: Tensor) -> None:
    if layer.kept_columns is not None:
        layer.kept_columns = layer.kept_columns[indices.to(layer.kept_columns.device)]
    if layer.kept_shift is not None:
        layer.kept_shift = layer.kept_shift[indices.to(layer.kept_shift.device)]


def short_mask(
    mask: Any,
    *,
    rows: Tensor | None,
    columns: Tensor,
    hollow: bool,
    ordered: bool,
    past: int,
    length: int,
    attended: Tensor | None,
    width: int | None,
    backend: str,
    dtype: torch.dtype,
) -> Any:
    """The attention mask of a layer whose queries are `rows` and whose keys are `columns` of the full one.

    Both axes are gathered, never cropped. None stays None where the shorter sequence is still plainly causal.

    Args:
        mask: what the text model built for the full sequence: None, `(batch, keys)`, `(batch | 1, 1, queries, keys)` or
            a block mask, which is opened, shortened and made anew.
        rows: `(batch, m)` queries that stay, counted within this forward pass, -1 for empty slots; None: all stay.
        columns: `(batch, keys)` columns that the layer holds after this pass, -1 for empty slots.
        hollow: whether there are empty slots among `rows` or `columns`.
        ordered: whether slots follow the order of the prompt; if not, causality goes by slot and masks are made anew.
        past, length: columns before this pass, and tokens in this pass, of the full sequence.
        attended: `(batch, past + length)` bool, real tokens; None: all.
        width: keys that the layer really has, where a static cache has unused slots behind; None: one a column.
        backend, dtype: the attention kernel and the dtype of the states.
    """
    empty = columns == PAD
    if rows is None:
        rows = torch.arange(length, device=columns.device).expand(columns.shape[0], -1)
    if mask is None and not hollow:
        return None
    if mask is None or not ordered:
        return new_mask(rows, columns, ordered, past, attended, width, backend, dtype)
    given, mask = mask, compat.opened(mask)
    if mask.dim() == 2:
        return torch.gather(mask, 1, columns.clamp(min=0)).masked_fill(empty, 0)
    if mask.dim() != 4:
        raise DartLabError(f"an attention mask with {mask.dim()} dimensions cannot be shortened; expected None, 2 or 4")
    keys = mask.shape[3]
    full = mask.expand(columns.shape[0], -1, -1, -1)
    short = torch.gather(full, 2, rows.clamp(min=0)[:, None, :, None].expand(-1, mask.shape[1], -1, keys))
    short = torch.gather(short, 3, columns.clamp(min=0)[:, None, None, :].expand(-1, mask.shape[1], rows.shape[1], -1))
    closed = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    open_ = True if mask.dtype == torch.bool else 0.0
    short = short.masked_fill(empty[:, None, None, :], closed)
    if hollow:  # an empty query slot sees only itself, so that its softmax stays finite
        own = torch.full_like(short, closed).masked_fill(_own_slot(rows, columns), open_)
        short = torch.where((rows == PAD)[:, None, :, None], own, short)
    short = _widen(short, width, closed)
    return short if mask is given else compat.block_mask(short)


def new_mask(
    rows: Tensor,
    columns: Tensor,
    ordered: bool,
    past: int,
    attended: Tensor | None,
    width: int | None,
    backend: str,
    dtype: torch.dtype,
) -> Any:
    """A causal mask of its own for `rows` against `columns`: real tokens only; an empty query slot sees itself."""
    if ordered:
        allowed = columns[:, None, :] <= (past + rows)[:, :, None]
    else:
        slot = torch.arange(columns.shape[1], device=columns.device)
        allowed = (slot <= slot[columns.shape[1] - rows.shape[1] :, None])[None].expand(len(rows), -1, -1)
    allowed = allowed & (columns != PAD)[:, None, :]
    if attended is not None:
        allowed = allowed & attended.gather(1, columns.clamp(min=0))[:, None, :]
    blind = (rows == PAD)[:, :, None] | ~allowed.any(dim=2, keepdim=True)
    allowed = torch.where(blind, _own_slot(rows, columns), allowed)
    return compat.mask_from_allowed(_widen(allowed[:, None], width, False), backend, dtype)


def _widen(mask: Tensor, width: int | None, closed: float) -> Tensor:
    """Close the unused slots of a static cache: pad the keys of a mask on the right up to `width`."""
    return mask if width is None else torch.nn.functional.pad(mask, (0, width - mask.shape[3]), value=closed)


def _own_slot(rows: Tensor, columns: Tensor) -> Tensor:
    """`(queries, keys)` bool: True where a query meets its own slot (the queries are the last slots)."""
    own = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device)
    return torch.nn.functional.pad(own, (columns.shape[1] - rows.shape[1], 0))
