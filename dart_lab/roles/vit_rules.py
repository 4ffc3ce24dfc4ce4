"""Definitions of ViT sinks: by the norm of the vision feature, by channels, by attention inside the tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.roles.rule import COLUMN_SUMS, Flagged, Rule, by_picture, largest, no_token
from dart_lab.roles.sinks import energy_share

if TYPE_CHECKING:
    from dart_lab.roles.rolebook import Rolebook
    from dart_lab.vlm.states import VisualStates


def _features(states: VisualStates, rule: Rule, what: str) -> Tensor:
    if states.vision is None:
        raise DartLabError(
            f"rule {type(rule).__name__} reads {what} of vision features, but this model merges patches between tower "
            "and language model; give vit-sink the rule 'centroid' or 'none'"
        )
    return states.vision.float()


@dataclass(frozen=True)
class NormAuto(Rule):
    """Norm of the vision feature from the cut of the pool on; where the pool has none, or the model merges patches, no
    token.
    """

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        if states.vision is None:
            return no_token(states)
        norm = states.vision.float().norm(dim=-1)
        flag = torch.zeros_like(norm, dtype=torch.bool) if book.vit_cut is None else norm >= book.vit_cut
        return flag, {"vit norm": norm}


@dataclass(frozen=True)
class Norm(Rule):
    """Norm of the vision feature ≥ `cut`: 100 for CLIP-L/14-336 in LLaVA-1.5 (2510.08510), 150 for DINOv2 (2309.16588).

    Such numbers belong to one encoder.
    """

    cut: float = 100.0

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        norm = _features(states, self, "norms").norm(dim=-1)
        return norm >= self.cut, {"vit norm": norm}


@dataclass(frozen=True)
class NormSpread(Rule):
    """Norm above the picture's mean plus `deviations` standard deviations (Neo et al. 2410.07149)."""

    deviations: float = 2.0

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        norm = _features(states, self, "norms").norm(dim=-1)
        high = by_picture(states, norm, lambda own: own > own.mean() + self.deviations * own.std(correction=0))
        return high, {"vit norm": norm}


@dataclass(frozen=True)
class NormTop(Rule):
    """The `share` of a picture's tokens with the largest norms, at least one; ties go to the lower index."""

    share: float = 0.01

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        norm = _features(states, self, "norms").norm(dim=-1)
        return by_picture(states, norm, lambda own: largest(own, self.share)), {"vit norm": norm}


@dataclass(frozen=True)
class VisionChannels(Rule):
    """One of a few channels holds at least `share` of the energy of the vision feature (after 2604.03316).

    Attributes:
        channels: for example (650,) for CLIP-L/14-336 in LLaVA-1.5. Default: those that the fit found on the tokens
            with the largest norms.
        share: of the energy. Default 0.10.
    """

    channels: tuple[int, ...] | None = None
    share: float = 0.10

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        features = _features(states, self, "channels")
        channels = book.vit_channels if self.channels is None else self.channels
        if channels is None:
            raise DartLabError(
                "this rolebook does not say on which channels of the tower sinks spike; fit it again, or give "
                "VisionChannels(channels=(…))"
            )
        if channels and not 0 <= min(channels) <= max(channels) < features.shape[-1]:
            raise DartLabError(f"channels={channels}: the vision features have channels 0 to {features.shape[-1] - 1}")
        energy = energy_share(features, channels)
        return (energy >= self.share) & bool(channels), {"vit energy": energy}


@dataclass(frozen=True)
class ColumnSums(Rule):
    """The `share` of a picture's tokens to which the tower attends most, at least one; ties go to the lower index.

    What a token gets is the sum of its column of attention, over all queries of the tower, in the block that makes the
    features; the score is that over the picture's median.
    """

    needs: ClassVar[frozenset[str]] = frozenset({COLUMN_SUMS})
    share: float = 0.01

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        sums = states.column_sums
        if sums is None:
            raise DartLabError(
                f"rule {type(self).__name__} reads attention in the vision tower, of which this model's tokens are not "
                "one to one the patches, or which was not measured; use Rolebook.assign, or give vit-sink the rule "
                "'centroid' or 'none'"
            )
        least = torch.finfo(sums.dtype).tiny
        flag = by_picture(states, sums, lambda own: largest(own, self.share))
        return flag, {"vit concentration": by_picture(states, sums, lambda own: own / own.median().clamp(min=least))}
