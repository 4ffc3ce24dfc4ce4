"""The sinks of a language model from text alone: on which channels they spike, in which layers, and how high."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dart_lab.roles.sinks import SinkChannels, energy_share, sink_channels, sink_layers
from dart_lab.vlm.states import text_states

if TYPE_CHECKING:
    from dart_lab.roles.fit import Fit

SUBJECTS = ("the cat", "a red house", "my old friend", "the number seven", "water", "this picture", "nobody", "the sun")
PREDICATES = ("is on the left", "was found", "has two sides", "will come back", "looks blue", "costs nothing",
              "and the other one", "in the morning")  # fmt: skip
DELIMITERS = (".", "\n")


@dataclass(frozen=True, kw_only=True)
class TextSinks:
    """What text says about the sinks of a language model.

    Attributes:
        channels: channels on which they spike; empty: they do not spike.
        layers: the layers whose inputs tell a sink: those up to `Fit.upto` in which the sinks of text spike.
        energy: the share of a token's energy on one of the channels from which it is a sink.
        why: the evidence in words.
        held: the share that the sinks of text hold, the median.
        profile: the evidence in numbers, one a layer: `layers`, `median` |x| of all tokens, and on `channel` the median
            |x| at `sinks` and the largest |x| on `ordinary` text, which is what does not spike.
    """

    channels: tuple[int, ...]
    layers: tuple[int, ...]
    energy: float
    why: str
    held: float = 1.0
    profile: dict[str, Any] = field(default_factory=dict)


def find_text_sinks(vlm: Any, how: Fit) -> TextSinks:
    """Find the sink channels on `<bos>` and delimiters of short texts.

    A channel must spike there, and be `how.distinct` times as large as on the other tokens. Where ordinary text already
    holds `how.energy` of its energy on the channels, the cut moves halfway from its largest token to the sinks.
    """
    tokenizer, depth = vlm.processor.tokenizer, vlm.depth
    layers = range(min(2, depth - 1), max(depth - 1, min(2, depth - 1) + 1))
    rows, special = _texts(tokenizer)
    states = text_states(vlm, rows, list(layers))
    at = torch.cat([one[:, mask] for one, mask in zip(states, special, strict=True)], dim=1)
    off = torch.cat([one[:, ~mask] for one, mask in zip(states, special, strict=True)], dim=1)
    median = torch.cat([at, off], dim=1).abs().flatten(1).median(dim=1).values
    found = sink_channels(at, median, share=how.energy, layers=how.often)
    kept = SinkChannels(
        channels=tuple(c for c in found.channels if _distinct(at, off, median, c, found.rule, how)), rule=found.rule
    )
    window = tuple(sink_layers(depth, upto=how.upto))
    where = f"{len(layers)} layers, {at.shape[1]} tokens at <bos> and delimiters of {len(rows)} texts"
    if not kept.channels:
        top = int(at.abs().amax(dim=(0, 1)).argmax())
        why = f"no channel is large at <bos> and delimiters alone ({where}); no LLM sink is told"
        return TextSinks(
            channels=(), layers=window, energy=how.energy, why=why,
            profile=_profile(layers, at.abs()[..., top].amax(dim=1), off, median, top),
        )  # fmt: skip
    held = _held(at, median, kept, how)  # (layers, tokens)
    sinks = held.float().mean(dim=0) >= how.often
    spiking = held[:, sinks].float().mean(dim=1) >= how.often
    window = tuple(n for n, one in zip(layers, spiking.tolist(), strict=True) if one and n in window) or window
    calm = _held(off, median, kept, how).float().mean(dim=0) < how.often  # a few words are sinks themselves
    off = off[:, calm]
    inside = [number - layers[0] for number in window]
    least = float(energy_share(at[inside][:, sinks], kept.channels).median())
    energy, moved = _energy(least, off[inside], kept.channels, how)
    why = (
        f"channels {list(kept.channels)} spike ({kept.rule} rule; {where}); "
        f"seen in layers {window[0]} to {window[-1]}, from {energy:.2f} of a token's energy{moved}"
    )
    loudest = max(kept.channels, key=lambda c: float(at[:, sinks, c].abs().median()))
    return TextSinks(
        channels=kept.channels, layers=window, energy=energy, why=why, held=least,
        profile=_profile(layers, at[:, sinks, loudest].abs().median(dim=1).values, off, median, loudest),
    )  # fmt: skip


def _texts(tokenizer: Any) -> tuple[list[list[int]], list[Tensor]]:
    """Token ids of short texts, and which of them are `<bos>` or a delimiter."""
    texts = [f"{subject} {predicate}.\n" for subject in SUBJECTS for predicate in PREDICATES]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    marks = {
        number for mark in DELIMITERS for number in tokenizer(mark, add_special_tokens=False)["input_ids"]
    } - {tokenizer.unk_token_id}  # fmt: skip
    rows = [start + tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return rows, [torch.tensor([place == 0 or number in marks for place, number in enumerate(row)]) for row in rows]


def _held(states: Tensor, median: Tensor, found: SinkChannels, how: Fit) -> Tensor:
    """`(layers, tokens)` bool: where one of the channels spikes, by the rule that found them."""
    if found.rule == "energy":
        return energy_share(states, found.channels) >= how.energy
    size = states.abs()[..., list(found.channels)].amax(dim=-1)
    return (size > how.floor) & (size >= how.times_median * median[:, None])


def _distinct(at: Tensor, off: Tensor, median: Tensor, channel: int, rule: str, how: Fit) -> bool:
    """Whether a channel is larger where it spikes than on ordinary text, by the medians."""
    held = _held(at, median, SinkChannels(channels=(channel,), rule=rule), how)
    sinks = held.float().mean(dim=0) >= how.often
    if not bool(sinks.any()) or not off.shape[1]:
        return bool(sinks.any())
    held = held & sinks
    layers = held.any(dim=1)
    return bool(at[..., channel].abs()[held].median() > how.distinct * off[layers][..., channel].abs().median())


def above_pictures(found: TextSinks, states: Tensor) -> TextSinks:
    """Move the energy cut above what pictures' tokens hold ordinarily: sinks are few, so the median token is none.

    A projector may load a sink channel of every token that it makes, without a spike. Where the median token reaches
    the cut, the cut moves halfway from it to the sinks of text; where it holds as much as they do, nothing moves.

    Args:
        found: what text says.
        states: `(layers, tokens, channels)` inputs of `found.layers` at the visual tokens of some pictures.

    >>> text = TextSinks(channels=(0,), layers=(2,), energy=0.1, why="", held=0.9)
    >>> round(above_pictures(text, torch.tensor([[[1.0, 2.0], [1.0, 2.0], [3.0, 0.0]]])).energy, 2)
    0.55
    """
    usual = float(energy_share(states, found.channels).median(dim=0).values.median())
    if not found.energy <= usual < found.held:
        return found
    energy = (usual + found.held) / 2
    why = f"{found.why}; pictures' median token holds {usual:.2f}, so from {energy:.2f}, halfway to sinks of text"
    return replace(found, energy=energy, why=f"{why} ({found.held:.2f})")


def _energy(least: float, ordinary: Tensor, channels: tuple[int, ...], how: Fit) -> tuple[float, str]:
    """The cut of the energy share, and why it is not the default one; `least` is what sinks hold."""
    if not ordinary.shape[1]:
        return how.energy, ""
    most = float(energy_share(ordinary, channels).median(dim=0).values.max())
    if most < how.energy or least <= most:
        return how.energy, ""
    return (most + least) / 2, f", halfway between sinks ({least:.2f}) and the most on ordinary text ({most:.2f})"


def _profile(layers: range, sinks: Tensor, off: Tensor, median: Tensor, channel: int) -> dict[str, Any]:
    ordinary = off[..., channel].abs().amax(dim=1).tolist() if off.shape[1] else []
    return {"channel": channel, "layers": list(layers), "sinks": sinks.tolist(), "ordinary": ordinary,
            "median": median.tolist()}  # fmt: skip
