"""DART's pivots: the few tokens that all others are compared with, and the order in which they choose."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.signals import Signals

PivotScore = Literal["k_norm", "v_norm", "attention", "random"]
PivotOrder = Literal["score", "cpython_set"]

SIGNALS: dict[PivotScore, frozenset[str]] = {
    "k_norm": frozenset({"keys"}),
    "v_norm": frozenset({"values"}),
    "attention": frozenset({"attention"}),
    "random": frozenset(),
}


def pivot_scores(signals: Signals, kind: PivotScore, seed: int) -> tuple[Tensor, Tensor]:
    """What pivots are ranked by, for visual tokens `(batch, n)` and for text tokens after the image `(batch, t)`.

    * `k_norm`, `v_norm`: L1 norm of the token's key (after rotary embedding) or value, all heads together.
    * `attention`: attention that the token receives from the prompt's last token, mean over heads. The paper does not
      define the score of text tokens; here the same row serves both kinds.
    * `random`: uniform draws, the same for a sample whatever the batch it comes in.

    >>> keys = torch.tensor([1.0, -3.0, 2.0]).reshape(1, 1, 3, 1)
    >>> pivot_scores(Signals.of(visual=torch.tensor([[0, 1]]), keys=keys), "k_norm", seed=0)
    (tensor([[1., 3.]]), tensor([[2.]]))
    """
    if kind == "random":
        return _random_scores(signals, seed)
    if kind == "attention":
        score = signals.attention(signals.last[:, None]).float().mean(dim=1)[:, 0]
    else:
        states = signals.get("keys" if kind == "k_norm" else "values")
        wide = torch.promote_types(states.dtype, torch.float32)  # half precision sums in float32
        score = torch.linalg.vector_norm(states, ord=1, dim=-1, dtype=wide).sum(dim=1).float()
    return torch.gather(score, 1, signals.visual.clamp(min=0)), torch.gather(score, 1, signals.text.clamp(min=0))


def _random_scores(signals: Signals, seed: int) -> tuple[Tensor, Tensor]:
    image = torch.zeros(signals.visual.shape)
    text = torch.zeros(signals.text.shape)
    for row in range(len(image)):
        generator = signals.generator(row, seed)
        for score, count in ((image, signals.valid[row].sum()), (text, (signals.text[row] != PAD).sum())):
            score[row, : int(count)] = torch.rand(int(count), generator=generator)
    return image.to(signals.visual.device), text.to(signals.visual.device)


def cpython_set_order(pivots: Tensor, attended: Tensor) -> Tensor:
    """Order pivots as CPython iterates over a set of their positions, as the released code does.

    CPython keeps small integers in a table by their low bits and probes further on a collision, so the order depends
    on the values, on the order in which they went in (image pivots, then text pivots) and on the table's size. It is
    the same in all releases of CPython that run this package, and in no way part of the method.

    Args:
        pivots: `(batch, p)` int64 positions in the sequence, image pivots first, padded with -1.
        attended: `(batch, sequence)` bool; positions are counted over real tokens, so that padding changes nothing.

    Returns:
        `(batch, p)` the same positions, reordered, padding last.

    >>> positions = torch.tensor([[40, 300, 35, 610, 615, 620, 650, 700]])
    >>> cpython_set_order(positions, torch.ones(1, 701, dtype=torch.bool)).tolist()
    [[610, 35, 615, 40, 650, 300, 620, 700]]
    """
    counted = torch.gather(attended.long().cumsum(dim=1) - 1, 1, pivots.clamp(min=0))
    rows = []
    for position, number in zip(pivots.tolist(), counted.tolist(), strict=True):
        inserted = [c for p, c in zip(position, number, strict=True) if p != PAD]
        back = {c: p for p, c in zip(position, number, strict=True) if p != PAD}
        rows.append([back[c] for c in set(inserted)] + [PAD] * (len(position) - len(inserted)))
    return torch.tensor(rows, dtype=torch.int64, device=pivots.device).reshape(pivots.shape)


def positions(table: Tensor, rows: Tensor) -> Tensor:
    """Look indices up: table `(batch, n)`, rows `(batch, m)` padded with -1 → `(batch, m)`, the padding kept."""
    return torch.where(rows == PAD, PAD, torch.gather(table, 1, rows.clamp(min=0)))
