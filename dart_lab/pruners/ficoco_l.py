"""FiCoCo-L: filter, correlate and compress visual tokens inside the language model (arXiv 2411.17686)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import Tensor

from dart_lab.errors import check_whole
from dart_lab.pruners.base import PositionPolicy, Pruner
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.ficoco import Compression, compress, most_redundant, recipients
from dart_lab.pruners.ficoco_v import Formula, check_weights, left_after
from dart_lab.pruners.reduction import PAD, Reduction, gather_tokens, rows_to_mask
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.staged import Staged


@dataclass(frozen=True, kw_only=True)
class FiCoCoL(Staged):
    """From decoder layer `layer` on, every layer discards the most redundant visual tokens and merges them.

    Filter: s_i = β · (attention that i receives from the visual tokens, mean) − (1 − β) · (attention that i receives
    from the question, mean); the largest s are discarded. Correlate: C_ij = γ · (A_ij + A_ji) + (1 − γ) · Σ_k A_ki A_kj
    over the question's tokens k; each i goes to the kept j in the upper ε-quantile of its row. Compress: weighted mean
    (Algorithm 2).

    Args:
        keep: visual tokens to end with, or retention ratio; the layers share what goes.
        layer: first layer. Default 5.
        layers: how many. Default 27 (layers 5 to 31 of 32).
        balance: β. Default 0.6.
        direct: γ. Default 0.6.
        quantile: ε. Default 0.998.
        formula: "paper" (default), or "released": raw logits without the causal mask, β · Σ_j − (1 − β) · mean_k along
            the rows of i, C_ij = γ L_ij + (1 − γ) Σ_k L_ik L_kj through a softmax, and recipients that only add up.

    Under a causal mask a visual token neither sees the question nor later visual tokens, so the paper's A_ik and half
    of its A_ij vanish; here the question looks back (A_ki), and the two directions are added.
    Without a question its terms are 0. Raises `DartLabError` for parameters out of range.

    >>> [part.stage.layer for part in FiCoCoL(keep=4, layer=2, layers=3).parts()]
    [2, 3, 4]

    Differs from the official code in: the image is where it is (there, positions 0 to 575); recipients are kept tokens,
    so that nothing is lost; the first visual token is not protected; positions are renumbered once, not step by step.
    """

    name: ClassVar[str] = "ficoco-l"
    paper: ClassVar[str] = "Filter, Correlate, Compress: Training-Free Token Reduction, arXiv 2411.17686"
    positions: ClassVar[PositionPolicy] = "compact"

    layer: int = 5
    layers: int = 27
    balance: float = 0.6
    direct: float = 0.6
    quantile: float = 0.998
    formula: Formula = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("ficoco-l: layers", self.layers, least=1)
        check_weights(self.name, balance=self.balance, direct=self.direct, quantile=self.quantile)
        check_choice(self.name, "formula", self.formula, get_args(Formula))

    def parts(self) -> tuple[Pruner, ...]:
        """One step a layer."""
        return tuple(
            FiCoCoLLayer(keep=self.keep, layer=self.layer + step, step=step, method=self) for step in range(self.layers)
        )


@dataclass(frozen=True, kw_only=True)
class FiCoCoLLayer(Pruner):
    """Step `step` (0-based) of a `FiCoCoL`, before decoder layer `layer`."""

    name: ClassVar[str] = "ficoco-l-layer"
    positions: ClassVar[PositionPolicy] = "compact"

    step: int
    method: FiCoCoL

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Signals of the chosen formula."""
        return frozenset({"attention" if self.method.formula == "paper" else "attention_logits"})

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens that this layer leaves."""
        return left_after(self.keep, signals.before, self.step, self.method.layers).minimum(signals.counts)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Filter, correlate, compress."""
        visual, from_text, to_text = self._maps(signals)
        released = self.method.formula == "released"
        if released:
            score = filter_released(visual, to_text, signals, self.method)
        else:
            score = filter_paper(visual, from_text, signals, self.method)
        discarded = most_redundant(score, signals.counts - asked, signals.valid)
        gone = rows_to_mask(discarded, signals.valid.shape[1])
        allowed = (signals.valid & ~gone)[:, None]
        if released:
            correlation = correlate_released(visual, to_text, from_text, self.method.direct)
        else:
            correlation = correlate_paper(visual, from_text, self.method.direct)
        rows = gather_tokens(correlation, discarded)
        allowed = allowed.expand_as(rows)
        if released:
            rows = rows.masked_fill(~allowed, float("-inf")).softmax(dim=2).nan_to_num(nan=0.0)
        column, weight = recipients(rows, allowed, quantile=self.method.quantile)
        how: Compression = "add" if released else "mean"
        return compress(discarded, column, weight, signals.counts, asked, how=how, score=score)

    def _maps(self, signals: Signals) -> tuple[Tensor, Tensor, Tensor]:
        """Mean over heads: visual × visual `(batch, n, n)`, question × visual and, turned, visual × question
        `(batch, t, n)`; 0 where there is no token. The last is read only by the released formula.
        """
        of = "attention" if self.method.formula == "paper" else "attention_logits"
        text, real = signals.text, (signals.text != PAD)[:, :, None]
        rows = signals.mean_attention(signals.visual, of=of).masked_fill(~signals.valid[:, :, None], 0.0)
        from_text = signals.at_visual(signals.mean_attention(text, of=of)).masked_fill(~real, 0.0)
        if of == "attention":
            return signals.at_visual(rows), from_text, from_text
        to_text = rows.gather(2, text.clamp(min=0)[:, None].expand(-1, rows.shape[1], -1)).mT
        return signals.at_visual(rows), from_text, to_text.masked_fill(~real | ~signals.valid[:, None], 0.0)


def filter_paper(visual: Tensor, from_text: Tensor, signals: Signals, method: FiCoCoL) -> Tensor:
    """Redundancy `(batch, n)`: attention received from visual tokens against that from the question."""
    received = visual.sum(dim=1) / signals.counts[:, None].clamp(min=1)
    asked_for = from_text.sum(dim=1) / (signals.text != PAD).sum(dim=1, keepdim=True).clamp(min=1)
    return method.balance * received - (1 - method.balance) * asked_for


def filter_released(visual: Tensor, to_text: Tensor, signals: Signals, method: FiCoCoL) -> Tensor:
    """Redundancy `(batch, n)` from raw logits: β · Σ_j L_ij − (1 − β) · mean_k L_ik."""
    task = to_text.sum(dim=1) / (signals.text != PAD).sum(dim=1, keepdim=True).clamp(min=1)
    return method.balance * visual.sum(dim=2) - (1 - method.balance) * task


def correlate_paper(visual: Tensor, from_text: Tensor, direct: float) -> Tensor:
    """`(batch, n, n)`: direct correlation in both directions, and the indirect one through the question."""
    return direct * (visual + visual.mT) + (1 - direct) * (from_text.mT @ from_text)


def correlate_released(visual: Tensor, to_text: Tensor, from_text: Tensor, direct: float) -> Tensor:
    """`(batch, n, n)` raw logits: γ L_ij + (1 − γ) Σ_k L_ik L_kj."""
    return direct * visual + (1 - direct) * (to_text.mT @ from_text)
