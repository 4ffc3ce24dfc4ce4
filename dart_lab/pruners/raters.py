"""Which text tokens may judge the visual ones, and how they look at them (SparseVLM, arXiv 2410.04417, §3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.pruners.reduction import PAD, gather_tokens, mask_to_rows
from dart_lab.pruners.selectors import top_k
from dart_lab.pruners.signals import Signals


def rater_scores(image: Tensor, text: Tensor, image_valid: Tensor, text_valid: Tensor) -> Tensor:
    """How much each text token is what the visual tokens point to.

    Softmax over the text of the raw dot products with each visual token, mean over the visual tokens.

    Args:
        image: `(batch, n, channels)`, input embeddings of the visual tokens.
        text: `(batch, t, channels)`, those of the text after the image.
        image_valid, text_valid: `(batch, n)`, `(batch, t)` bool.

    Returns:
        `(batch, t)` float32, sums to 1; 0 at padding and where there is no text.
    """
    logits = (image.float() @ text.float().mT).masked_fill(~text_valid[:, None, :], float("-inf"))
    share = torch.softmax(logits, dim=2).nan_to_num(nan=0.0) * image_valid[:, :, None]
    return share.sum(dim=1) / image_valid.sum(dim=1, keepdim=True).clamp(min=1)


def above_mean(score: Tensor, valid: Tensor) -> Tensor:
    """`(batch, t)` bool: entries above their row's mean; all valid ones of a row in which none is above it.

    >>> above_mean(torch.tensor([[0.2, 0.5, 0.3], [0.5, 0.5, 0.0]]), torch.tensor([[True] * 3, [True, True, False]]))
    tensor([[False,  True, False],
            [ True,  True, False]])
    """
    mean = (score * valid).sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    above = valid & (score > mean)
    return torch.where(above.any(dim=1, keepdim=True), above, valid)


def text_raters(signals: Signals) -> Tensor:
    """`(batch, r)` int64: positions of the raters, padded with -1; the last token if no text follows the image.

    They are chosen on the input embeddings of all visual tokens there were before any stage (`image_embeds`), so that
    every stage of one prompt has the same ones; without that signal, on the `embeds` of those still there.
    """
    embeds, text = signals.get("embeds"), signals.text
    if not text.shape[1]:
        return signals.last[:, None]
    if "image_embeds" in signals.providers:
        image = signals.get("image_embeds")
        image_valid = torch.arange(image.shape[1], device=image.device) < signals.before[:, None]
    else:
        image, image_valid = gather_tokens(embeds, signals.visual), signals.valid
    score = rater_scores(image, gather_tokens(embeds, text), image_valid, text != PAD)
    chosen = mask_to_rows(above_mean(score, text != PAD))
    raters = text.gather(1, chosen.clamp(min=0)).masked_fill(chosen == PAD, PAD)
    none = (raters == PAD).all(dim=1)
    return torch.cat([torch.where(none, signals.last, raters[:, 0])[:, None], raters[:, 1:]], dim=1)


def attention_from_raters(signals: Signals, raters: Tensor, *, heads: int | float = 1.0) -> Tensor:
    """Attention `(batch, r, n)` of the raters onto the visual tokens, mean over the heads that look there most.

    Args:
        raters: `(batch, r)` int64 positions, padded with -1.
        heads: how many heads count (at most all), or which share of them (at least one).
    """
    rows = signals.attention_to_visual(raters).float()  # (batch, heads, r, n)
    total = rows.shape[1]
    wanted = min(total, heads if isinstance(heads, int) else max(1, int(total * heads)))
    if wanted == total:
        return rows.mean(dim=1)
    order = most_attentive_heads(rows, raters != PAD, wanted)
    index = order[:, :, None, None].expand(-1, -1, *rows.shape[2:])
    return rows.gather(1, index).mean(dim=1)


def most_attentive_heads(rows: Tensor, counted: Tensor, wanted: int) -> Tensor:
    """`(batch, wanted)` int64: heads whose `rows` `(batch, heads, r, n)` sum up to most over `counted` `(batch, r)`."""
    sums = (rows * counted[:, None, :, None]).sum(dim=(2, 3))
    return top_k(sums, torch.full((len(sums),), wanted, device=sums.device), torch.ones_like(sums, dtype=torch.bool))
