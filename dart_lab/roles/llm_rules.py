"""Definitions of LLM sinks: by spikes on a few channels, by attention, by likeness with the first token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.roles.rule import ATTENTION, RECEIVED, Flagged, Rule, by_picture, inputs_of, no_token
from dart_lab.roles.sinks import energy_share, spike_over_median, spike_over_rms

if TYPE_CHECKING:
    from dart_lab.roles.rolebook import Rolebook
    from dart_lab.vlm.states import VisualStates


@dataclass(frozen=True)
class Spike(Rule):
    """What rules about spikes share: it must hold in the book's share of its layers.

    Attributes:
        channels: default: those that the fit found on text.
    """

    runs: ClassVar[bool] = True
    channels: tuple[int, ...] | None = None

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        channels = book.channels if self.channels is None else self.channels
        if not channels:
            return no_token(states)
        layers = inputs_of(book.layers, states, self)
        if not 0 <= min(channels) <= max(channels) < layers.shape[-1]:
            raise DartLabError(f"channels={channels}: the language model has channels 0 to {layers.shape[-1] - 1}")
        often = self.spikes(book, layers, channels).float().mean(dim=0)
        return often >= book.often, self.scores(often)

    @abstractmethod
    def spikes(self, book: Rolebook, layers: Tensor, channels: tuple[int, ...]) -> Tensor:
        """`(layers, n, channels)` → `(layers, n)` bool."""

    def scores(self, often: Tensor) -> dict[str, Tensor]:
        """What is kept of `(n,)` the share of the layers."""
        return {}


@dataclass(frozen=True)
class Energy(Spike):
    """A sink channel holds the book's share of the energy in half of the layers (a width-free form of Kang's rule)."""

    def spikes(self, book: Rolebook, layers: Tensor, channels: tuple[int, ...]) -> Tensor:
        return energy_share(layers, channels) >= book.energy

    def scores(self, often: Tensor) -> dict[str, Tensor]:
        return {"llm energy": often}


@dataclass(frozen=True)
class Phi(Spike):
    """Kang's φ > `above` on the sink channels in half of the layers (2503.03321)."""

    above: float = 20.0

    def spikes(self, book: Rolebook, layers: Tensor, channels: tuple[int, ...]) -> Tensor:
        return spike_over_rms(layers, channels) > self.above


@dataclass(frozen=True)
class Psi(Spike):
    """Ψ ≥ `least` and |x| ≥ `floor` on the sink channels in half of the layers (2609.32808).

    The median is over the channels of the sample's visual tokens; the paper's includes the text's.
    """

    least: float = 1000.0
    floor: float = 100.0

    def spikes(self, book: Rolebook, layers: Tensor, channels: tuple[int, ...]) -> Tensor:
        big = layers.float().abs()[..., list(channels)].amax(dim=-1) >= self.floor
        return (spike_over_median(layers, channels) >= self.least) & big


def text_attention(book: Rolebook, states: VisualStates) -> Tensor:
    """`(n,)` share of the text's attention to the picture, mean over the layers that the book looks at."""
    if any(layer not in states.attention for layer in book.layers):
        raise DartLabError("rule 'attention' reads attention; use Rolebook.assign, which runs the model with it")
    return torch.stack([states.attention[layer] for layer in book.layers]).float().mean(dim=0)


@dataclass(frozen=True)
class Loud(Rule):
    """The text attends to it more than `times` as much as to the picture's median token (2510.08510: 7 times)."""

    needs: ClassVar[frozenset[str]] = frozenset({ATTENTION})
    times: float = 7.0

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        share = text_attention(book, states)
        return by_picture(states, share, lambda own: own > self.times * own.median()), {"attention": share}


@dataclass(frozen=True)
class EnergyOrAttention(Rule):
    """`Energy` where the language model has channels on which sinks spike; where it has none, `Loud`."""

    needs: ClassVar[frozenset[str]] = frozenset({ATTENTION})
    runs: ClassVar[bool] = True

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        return (Energy() if book.channels else Loud()).flags(book, states)


@dataclass(frozen=True)
class Received(Rule):
    """A query that sees it pays it at least `least` of its attention, on average, in the share `often` of the heads.

    The sink metric of Gu et al. (ICLR 2025): α of key k is the mean of A[i, k] over the real queries i ≥ k, so that
    being seen by more queries is no merit. Heads are those of all layers that the book looks at.

    Attributes:
        least: their ε. Default 0.3.
        often: share of the heads. Default 0.5; they count heads and do not cut.
    """

    needs: ClassVar[frozenset[str]] = frozenset({RECEIVED})
    least: float = 0.3
    often: float = 0.5

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        if any(layer not in states.received for layer in book.layers):
            raise DartLabError("rule 'received' reads attention; use Rolebook.assign, which runs the model with it")
        heads = torch.cat([states.received[layer] for layer in book.layers])
        often = (heads >= self.least).float().mean(dim=0)
        return often >= self.often, {"sink heads": often}


@dataclass(frozen=True)
class LikeFirst(Rule):
    """Cosine ≥ `least` with the first token's state, `<bos>` as a rule, behind the MLP of layer `after`.

    EmbedLens (2603.00510): LLM sinks align with it after the second MLP.

    Attributes:
        least: cosine. Default 0.9.
        after: decoder layer, from 0. Default 1.
    """

    runs: ClassVar[bool] = True
    least: float = 0.9
    after: int = 1

    def layers(self, book: Rolebook) -> tuple[int, ...]:
        return (self.after + 1,)

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        tokens = inputs_of(self.layers(book), states, self)[0].float()
        first = states.first.get(self.after + 1)
        if first is None:
            raise DartLabError(
                "rule 'like-bos' compares with the first token of the prompt, but the prompt begins with the picture; "
                "give llm-sink another rule"
            )
        cosine = torch.nn.functional.cosine_similarity(tokens, first.float()[None], dim=-1)
        return cosine >= self.least, {"bos cosine": cosine}
