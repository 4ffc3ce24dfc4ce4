"""FiCoCo-V: filter, correlate and compress patches inside the vision tower (arXiv 2411.17686)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.pruners.base import PositionPolicy, Pruner, Stage
from dart_lab.pruners.budget import check_choice, resolve_keep
from dart_lab.pruners.class_token import class_token_mask, class_token_note
from dart_lab.pruners.ficoco import compress, local_penalty, most_redundant, recipients, unit_length
from dart_lab.pruners.reduction import PAD, Reduction, gather_tokens, rows_to_mask
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.staged import Staged, spread
from dart_lab.pruners.windows import window_of

Formula = Literal["paper", "released"]


@dataclass(frozen=True, kw_only=True)
class FiCoCoV(Staged):
    """From block `first` on, every vision block discards the most redundant patches and merges them into kept ones.

    Filter: s_i = λ · (attention that patch i receives from the patches, mean) − (1 − λ) · (attention that the class
    token pays to i); in every 2 × 2 window the largest s is pushed up by `penalty`; the largest s are discarded.
    Correlate: C_ij = A_ij, discarded i against kept j; each i goes to the j in the upper ε-quantile of its row.
    Compress: weighted mean, see `dart_lab.pruners.ficoco.compress` (Algorithm 1).

    Args:
        keep: patches to end with, or retention ratio; the blocks share what goes, the first ones taking the remainder.
        first: first block. Default 12 (of CLIP-L's 24).
        blocks: how many. Default 11: LLaVA-1.5 takes the features of the last but one block.
        balance: λ. Default 0.35.
        penalty: factor of the local penalty. Default 2; 1 switches it off.
        quantile: ε. Default 0.998.
        formula: "paper" (default), or "released": raw logits averaged along rows, both terms scaled to unit length, the
            weights of the two terms exchanged, two recipients at most.

    Without a class token its attention is replaced by −cos(mean patch key, key of i), as in the paper; the note
    `class_token` says so. Raises `DartLabError` for parameters out of range.

    >>> [part.stage.layer for part in FiCoCoV(keep=4, first=2, blocks=3).parts()]
    [2, 3, 4]

    Differs from the official code in: the paper's "attention received" is a column mean (its formula, a row mean of
    softmax attention, is constant up to the class token's share); no buffer is carried from image to image; recipients
    are kept patches, addressed by their true index; the class token stays first.
    """

    name: ClassVar[str] = "ficoco-v"
    paper: ClassVar[str] = "Filter, Correlate, Compress: Training-Free Token Reduction, arXiv 2411.17686"
    keeps_cls: ClassVar[bool] = True
    positions: ClassVar[PositionPolicy] = "compact"

    first: int = 12
    blocks: int = 11
    balance: float = 0.35
    penalty: float = 2.0
    quantile: float = 0.998
    formula: Formula = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("first", 0), ("blocks", 1)):
            check_whole(f"ficoco-v: {name}", getattr(self, name), least)
        check_weights(self.name, balance=self.balance, quantile=self.quantile)
        if not self.penalty >= 1:
            raise DartLabError(f"ficoco-v: penalty={self.penalty!r}: give a factor of at least 1")
        check_choice(self.name, "formula", self.formula, get_args(Formula))

    def parts(self) -> tuple[Pruner, ...]:
        """One step a block."""
        return tuple(FiCoCoVBlock(keep=self.keep, step=step, method=self) for step in range(self.blocks))


@dataclass(frozen=True, kw_only=True)
class FiCoCoVBlock(Pruner):
    """Step `step` (0-based) of a `FiCoCoV`, in its vision block."""

    name: ClassVar[str] = "ficoco-v-block"
    keeps_cls: ClassVar[bool] = True
    positions: ClassVar[PositionPolicy] = "compact"

    step: int
    method: FiCoCoV

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Signals of the chosen formula."""
        return frozenset({"attention" if self.method.formula == "paper" else "attention_logits", "keys"})

    @property
    def stage(self) -> Stage:
        """Inside its vision block."""
        return Stage("VIT_BLOCK", self.method.first + self.step)

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens that leave the block, class token included."""
        special = class_token_mask(signals).sum(dim=1)
        return special + left_after(self.keep, signals.before - special, self.step, self.method.blocks)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Filter, correlate, compress."""
        patches = signals.valid & ~class_token_mask(signals)
        score, maps = self._filter(signals, patches)
        window = window_of(signals, (2, 2)).masked_fill(~patches, PAD)
        score = local_penalty(score, window, self.method.penalty)[0]
        discarded = most_redundant(score, signals.counts - asked, patches)
        gone = rows_to_mask(discarded, patches.shape[1])
        rows = gather_tokens(maps, discarded)
        column, weight = recipients(
            rows,
            (patches & ~gone)[:, None].expand_as(rows),
            quantile=self.method.quantile,
            most=None if self.method.formula == "paper" else 2,
        )
        reduction = compress(discarded, column, weight, signals.counts, asked, how="mean", score=score)
        return replace(reduction, notes=class_token_note(signals))

    def _filter(self, signals: Signals, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Redundancy `(batch, n)`, largest goes first, and correlations `(batch, n, n)`."""
        balance = self.method.balance
        pair = patches[:, :, None] & patches[:, None, :]
        if self.method.formula == "paper":
            maps = signals.at_visual(signals.mean_attention(signals.visual))
            received = maps.masked_fill(~pair, 0.0).sum(dim=1) / patches.sum(dim=1, keepdim=True)
            return balance * received - (1 - balance) * class_term(signals, patches, maps), maps
        logits = signals.at_visual(signals.mean_attention(signals.visual, of="attention_logits"))
        mean = logits.masked_fill(~pair, 0.0).sum(dim=2) / patches.sum(dim=1, keepdim=True)
        cls = class_term(signals, patches, logits)
        score = (1 - balance) * unit_length(mean, patches) - balance * unit_length(cls, patches)
        return score, logits.masked_fill(~signals.valid[:, None, :], float("-inf")).softmax(dim=2)


def class_term(signals: Signals, patches: Tensor, maps: Tensor) -> Tensor:
    """`(batch, n)`: the class token's row of `maps` `(batch, n, n)`, or −cos of each key to the mean patch key."""
    cls = class_token_mask(signals)
    if signals.cls is not None:
        return (maps * cls[:, :, None]).sum(dim=1)
    keys = gather_tokens(signals.get("keys").float().mean(dim=1), signals.visual)
    mean = (keys * patches[:, :, None]).sum(dim=1, keepdim=True) / patches.sum(dim=1)[:, None, None].clamp(min=1)
    return -torch.nn.functional.cosine_similarity(keys, mean, dim=2)


def left_after(keep: int | float | None, before: Tensor, step: int, steps: int) -> Tensor:
    """`(batch,)` int64: tokens left after a step (0-based) of `steps` even ones from `before` to `keep`."""
    goal = resolve_keep(1.0 if keep is None else keep, before)
    return torch.stack([n - sum(spread(int(n - m), steps)[: step + 1]) for n, m in zip(before, goal, strict=True)])


def check_weights(method: str, **weights: float) -> None:
    """Raise `DartLabError` unless every weight lies in [0, 1]."""
    for name, value in weights.items():
        if not 0 <= value <= 1:
            raise DartLabError(f"{method}: {name}={value!r}: give a number from 0 to 1")
