"""How much attention each patch gets from the class token, or from everybody where there is no class token."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.signals import Signals

NEEDS = frozenset({"attention", "received"})


def class_attention(signals: Signals) -> Tensor:
    """`(batch, n)` float32: the class token's attention to each visual token in the feature layer, mean over heads.

    Vision towers without a class token (SigLIP, Qwen's) give the attention received from all tokens instead; the
    record then says so in the note `class_token` (see `class_token_note`).
    """
    if signals.cls is not None:
        return signals.attention_to_visual(signals.cls[:, None]).float().mean(dim=1)[:, 0]
    received = signals.get("received").float().gather(1, signals.visual.clamp(min=0))
    return received.masked_fill(~signals.valid, 0.0)


def early_class_attention(signals: Signals, block: int, method: str) -> Tensor:
    """`(batch, n)` float32: the same in vision block `block` (0-based). Raises `DartLabError` without a class token."""
    if signals.cls is None:
        raise DartLabError(
            f"{method}: needs the class token's attention in vision block {block}, and this vision tower has no class "
            "token; fastervlm and visionzip do without"
        )
    return signals.attention_to_visual(signals.cls[:, None], of=f"attention@{block}").float().mean(dim=1)[:, 0]


def class_token_note(signals: Signals) -> dict[str, Tensor]:
    """The note `class_token`, `(batch,)` bool: True if there was a class token to look at."""
    return {"class_token": torch.full_like(signals.counts, signals.cls is not None, dtype=torch.bool)}


def class_token_mask(signals: Signals) -> Tensor:
    """`(batch, n)` bool: which visual token is the class token itself (none, unless the method keeps it as one)."""
    if signals.cls is None:
        return torch.zeros_like(signals.valid)
    return (signals.visual == signals.cls[:, None]) & (signals.visual != PAD)
