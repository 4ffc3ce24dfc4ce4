"""DART: keep a few pivots and the visual tokens that resemble them least (arXiv 2502.11494)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.budget import check_choice, check_one_of, check_reduction_ratio, retained
from dart_lab.pruners.dart_certificate import covering, duplication_margin
from dart_lab.pruners.dart_pivots import SIGNALS, PivotOrder, PivotScore, cpython_set_order, pivot_scores, positions
from dart_lab.pruners.dart_quota import OfficialPath, check_pivots, exact_quota, official_quota
from dart_lab.pruners.reduction import PAD, Reduction, rows_to_mask
from dart_lab.pruners.selectors import padding_last, stable_cosine, top_k
from dart_lab.pruners.signals import Signals, gather_tokens


@dataclass(frozen=True, kw_only=True)
class DART(Pruner):
    """Duplication-Aware Reduction of Tokens.

    Pivots are the visual tokens and the text tokens after the image that rank highest by `pivots`. Tokens are compared
    by cosine on the output of layer K−1 through the model's final norm. One pivot after the other takes, from the
    visual tokens not yet taken, its quota of those least like it. Image pivots and all that were taken stay.

    Args:
        keep: visual tokens to keep, or retention ratio. Leave out if `epsilon` or `reduction_ratio` is given.
        pivots: what ranks pivots: "k_norm" (L1 norm of keys, the paper's default), "v_norm", "attention", "random".
        largest: take the pivots with the largest score (default) or the smallest.
        image_pivots, text_pivots: how many of each, 4 and 4 by default; 0 leaves that source out.
        epsilon: the paper's definition in place of a number: x stays unless dup(p_i, x) > ε for every pivot.
        pivot_order: "score" (image pivots, then text pivots, each best first) or "cpython_set" (the order in which the
            released code happens to iterate). None: "score" for budget="exact", "cpython_set" for "official".
        budget: "exact" spends keep − image pivots evenly over the pivots, the first ones taking the remainder; if keep
            is no larger than image_pivots, the best image pivots alone stay; if the question is shorter than
            text_pivots, all of it serves. "official" keeps image_pivots + P·t of P pivots, with the quota t of
            `official_path`, and refuses what the released code cannot do.
        official_path: "llava": t = ⌊N/P⌋, or ⌊L(1−r)/P⌋ for a ratio (also Qwen2-VL and Qwen2.5-VL); "llava_next":
            t = ⌊min(N, L−image_pivots)/P⌋; "epic": as "llava", the last pivots taking what is left.
        reduction_ratio: r, the removed share, as the released code is given it (official budget only).
        certificate: also measure how far pruned tokens are from what stays, and the Lemma's bound (see
            `dart_certificate.covering`); several times the cost of the selection. Default False.

    Returns a `Reduction` whose `score` is the largest similarity to any pivot (low: unlike all of them), whose `order`
    is the order of choice, and whose notes are `pivots` (positions in the sequence), `quota`, `epsilon` (ε_i, the
    largest similarity among what pivot i took; −1 if it took nothing), all `(batch, pivots)`, and `margin`, `(batch,)`:
    see `dart_certificate.duplication_margin`.

    Raises `DartLabError` for contradictory parameters, and where no pivot exists or the official budget is infeasible.

    >>> states = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [1.0, 0.0]]])
    >>> keys = torch.tensor([9.0, 1.0, 1.0, 5.0]).reshape(1, 1, 4, 1)
    >>> signals = Signals.of(visual=torch.tensor([[0, 1, 2]]), normed=states, keys=keys)
    >>> DART(keep=2, image_pivots=1, text_pivots=1)(signals).keep
    tensor([[0, 2]])

    Differs from the official code in: the budget ("exact" keeps N, not image_pivots + P·⌊N/P⌋); the pivots' order;
    ties go to the lower index and are decided in float32; any batch size, each sample with its own image and question;
    a short question is no error. `budget="official"` follows the released code in the first two and in the last.
    Differs from the paper in: disjoint quotas in place of a threshold (`epsilon` gives the paper's sets); the pivots
    kept are the image's, as all text stays anyway.
    """

    name: ClassVar[str] = "dart"
    paper: ClassVar[str] = "Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More"

    pivots: PivotScore = "k_norm"
    largest: bool = True
    image_pivots: int = 4
    text_pivots: int = 4
    epsilon: float | None = None
    pivot_order: PivotOrder | None = None
    official_path: OfficialPath = "llava"
    reduction_ratio: float | None = None
    certificate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("dart", keep=self.keep, epsilon=self.epsilon, reduction_ratio=self.reduction_ratio)
        check_choice("dart", "pivots", self.pivots, SIGNALS)
        check_choice("dart", "pivot_order", self.pivot_order, (None, *get_args(PivotOrder)))
        check_choice("dart", "official_path", self.official_path, get_args(OfficialPath))
        check_reduction_ratio("dart", self.reduction_ratio, self.budget)
        for field in ("image_pivots", "text_pivots"):
            check_whole(f"dart: {field}", getattr(self, field), least=0)
        if self.image_pivots + self.text_pivots == 0:
            raise DartLabError("dart: image_pivots=0 and text_pivots=0: give at least one pivot (the paper: 4 and 4)")
        if self.epsilon is not None and (self.budget == "official" or not -1 <= self.epsilon <= 1):
            raise DartLabError(f"dart: epsilon={self.epsilon}: give a cosine in [-1, 1], with budget='exact'")

    def _needs_keep(self) -> bool:
        return self.epsilon is None and self.reduction_ratio is None

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Names of the signals that these parameters ask for."""
        return frozenset({"normed"}) | SIGNALS[self.pivots]

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens to keep; −1 where ε decides."""
        if self.budget == "official" and isinstance(self.keep, int):
            return torch.full_like(signals.counts, self.keep)  # feasible or not is decided by the quota
        if self.reduction_ratio is not None:
            return (signals.counts.double() * (1 - self.reduction_ratio)).round().long()
        return super().asked(signals)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Choose pivots; let each in turn take the tokens least like it."""
        normed, visual = signals.get("normed"), signals.visual
        images, pivots = self._choose_pivots(signals, asked)
        anchors = gather_tokens(normed, pivots)
        columns = visual.clamp(min=0)[:, None, :].expand(-1, pivots.shape[1], -1)
        duplication = stable_cosine(anchors, normed).gather(2, columns)  # (batch, pivots, n): dup(p_i, x)

        real = (pivots != PAD)[:, :, None]
        pool = signals.valid & ~rows_to_mask(images, visual.shape[1])
        quota, epsilon = torch.zeros_like(pivots), torch.full(pivots.shape, -1.0, device=visual.device)
        order = None
        if self.epsilon is not None:
            epsilon = torch.full_like(epsilon, self.epsilon)
            pool &= ~(real & (duplication <= self.epsilon)).any(dim=1)
        else:
            quota = self._quota(asked, signals.counts, (images != PAD).sum(dim=1), pivots != PAD)
            chosen = [images]
            for i in range(pivots.shape[1]):
                picks = top_k(-duplication[:, i], quota[:, i], pool)
                pool &= ~rows_to_mask(picks, visual.shape[1])
                taken = torch.gather(duplication[:, i], 1, picks.clamp(min=0)).masked_fill(picks == PAD, -1.0)
                epsilon[:, i] = torch.cat([taken, epsilon[:, i, None]], dim=1).amax(dim=1)
                chosen.append(picks)
            order = padding_last(torch.cat(chosen, dim=1))

        epsilon = epsilon.masked_fill(~real[:, :, 0], math.nan)
        kept = signals.valid & ~pool  # what is still in the pool is pruned
        notes = {"pivots": pivots, "quota": quota, "epsilon": epsilon,
                 "margin": duplication_margin(duplication, epsilon, pool)}
        if self.certificate:
            notes |= covering(gather_tokens(normed, visual).float(), kept, pool, anchors.float(), epsilon)
        score = duplication.masked_fill(~real, -math.inf).amax(dim=1)
        return Reduction.from_mask(kept, signals.counts, asked=asked, order=order,
                                   score=score.masked_fill(~signals.valid, math.nan), notes=notes)

    def _choose_pivots(self, signals: Signals, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Image pivots `(batch, p)` as visual tokens; all pivots `(batch, p + q)` as positions, in order."""
        in_text = signals.text != PAD
        image_score, text_score = pivot_scores(signals, self.pivots, self.seed)
        sign = 1 if self.largest else -1
        images_wanted = torch.full_like(signals.counts, self.image_pivots)
        texts_wanted = torch.full_like(signals.counts, self.text_pivots)
        if self.budget == "exact":
            images_wanted = images_wanted.minimum(signals.counts)
            images_wanted = torch.where(asked == PAD, images_wanted, images_wanted.minimum(asked))
            texts_wanted = texts_wanted.minimum(in_text.sum(dim=1))
        check_pivots(images_wanted, texts_wanted, signals.counts, in_text.sum(dim=1))
        images = top_k(sign * image_score, images_wanted, signals.valid)
        texts = top_k(sign * text_score, texts_wanted, in_text)
        pivots = torch.cat([positions(signals.visual, images), positions(signals.text, texts)], dim=1)
        default: PivotOrder = "cpython_set" if self.budget == "official" else "score"
        if (self.pivot_order or default) == "cpython_set":
            pivots = cpython_set_order(pivots, signals.attended)
        return images, pivots

    def _quota(self, asked: Tensor, size: Tensor, images: Tensor, real: Tensor) -> Tensor:
        """`(batch, pivots)` int64: how many tokens each pivot takes."""
        if self.budget == "exact":
            return exact_quota(asked - images, real)
        wanted = retained(self.keep, self.reduction_ratio)
        return official_quota(wanted, size, self.image_pivots, real, self.official_path)
