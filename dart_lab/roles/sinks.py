"""Sinks: tokens with an outlying norm in the vision tower, and tokens that spike on a few channels of the LLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.roles.histogram import Histogram


@dataclass(frozen=True, kw_only=True)
class NormCut:
    """Whether norms of vision features have an outlying upper mode, and where it begins.

    Attributes:
        cut: norm from which a token is a ViT sink; None: this encoder has none.
        why: the evidence in words.
        share: share of tokens above the candidate cut.
        gap: distance of the two modes' means in robust standard deviations of the lower one.
        depth: valley depth at the candidate cut, 0 to 1.
    """

    cut: float | None
    why: str
    share: float = 0.0
    gap: float = 0.0
    depth: float = 0.0


def norm_cut(
    log_norms: Histogram,
    *,
    max_share: float = 0.05,
    min_gap: float = 3.0,
    min_depth: float = 0.5,
    min_z: float = 5.0,
    smooth: int = 5,
) -> NormCut:
    """Find the ViT-sink norm of an encoder from a pool of images, or that it has none.

    Registers and sinks show as a small second mode of the norms (Darcet et al. 2309.16588). The cut is the deepest
    valley above the median behind which the counts rise again beyond chance; plain Otsu would split the main mode as
    soon as the second one holds less than a few percent.

    Args:
        log_norms: natural logarithms of the L2 norms of every token of the pool, at the projector's input.
        max_share: the upper mode may hold at most this share. Default 0.05.
        min_gap: least distance of the means, in robust standard deviations of the whole. Default 3.
        min_depth: least depth of the valley, 1 − counts there / counts of the second mode's peak. Default 0.5.
        min_z: the rise behind the valley in standard deviations of the counts. Default 5.
        smooth: bins that are summed before valleys are sought, odd. Default 5.

    >>> seen = Histogram(0.02)
    >>> seen.add([1.0, 1.1, 1.2] * 300)
    >>> norm_cut(seen).cut is None
    True
    """
    centre, count = log_norms.dense()
    middle, sd = log_norms.quantile(0.5), log_norms.robust_sd()
    even = np.convolve(np.pad(count, smooth // 2), np.ones(smooth), mode="valid")
    peak = np.append(np.maximum.accumulate(even[::-1])[::-1][1:], 0.0)  # highest place above each bin
    clear = (peak - even) >= min_z * np.sqrt(np.maximum(peak + even, 1))
    candidates = np.flatnonzero(clear & (centre > middle + sd))
    if not len(candidates):
        return NormCut(cut=None, why="the norms have one mode: nothing rises again above the median")
    ratio = even[candidates] / peak[candidates]
    lowest = candidates[ratio == ratio.min()]
    run = lowest[: int(np.argmax(np.append(np.diff(lowest) > 1, True))) + 1]  # the first stretch that is as empty
    cut = float(centre[run].mean())
    above = centre > cut
    share = float(count[above].sum() / count.sum())
    means = [float((count[part] * centre[part]).sum() / max(count[part].sum(), 1)) for part in (~above, above)]
    gap, depth = (means[1] - means[0]) / sd, float(1 - ratio.min())
    found = f"upper mode {share:.2%} of tokens, {gap:.1f} robust sd away, valley {depth:.2f} deep"
    if share > max_share or gap < min_gap or depth < min_depth:
        return NormCut(cut=None, why=f"no second mode: {found}", share=share, gap=gap, depth=depth)
    return NormCut(cut=float(np.exp(cut)), why=found, share=share, gap=gap, depth=depth)


@dataclass(frozen=True, kw_only=True)
class SinkChannels:
    """The channels on which sinks of a language model spike.

    Attributes:
        channels: channel numbers, ascending; empty: this model has no spiking sinks.
        rule: which of the rules found them.
    """

    channels: tuple[int, ...]
    rule: str


def sink_channels(
    states: Tensor,
    median: Tensor | None = None,
    *,
    floor: float = 100.0,
    times_median: float = 1000.0,
    share: float = 0.10,
    layers: float = 0.5,
) -> SinkChannels:
    """Find sink channels from text alone: states of `<bos>` and delimiters, no picture.

    A channel counts if on some of these tokens |x| > `floor` and |x| ≥ `times_median` × the median |x| of the layer's
    states (Sun et al. 2402.17762) in at least the share `layers` of the layers. If there is none: channels that hold at
    least `share` of a token's energy x² in as many layers, a rule that does not depend on width or scale.

    Args:
        states: `(layers, tokens, channels)`, inputs of decoder layers 2 … L − 2 at `<bos>` and delimiters.
        median: `(layers,)` median |x| of all tokens and channels of a layer. Default: that of the states given, which
            is too large where most of them are sinks.
        floor: least absolute value. Default 100.
        times_median: least multiple of the median. Default 1000.
        share: least share of the energy. Default 0.10.
        layers: share of the layers in which it must hold. Default 0.5.

    Raises:
        DartLabError: states without a layer or a token.

    >>> states = torch.ones(4, 2, 8)
    >>> states[:, 0, 5] = 5000.0
    >>> sink_channels(states)
    SinkChannels(channels=(5,), rule='massive')
    """
    if states.dim() != 3 or 0 in states.shape:
        raise DartLabError(f"states have shape {tuple(states.shape)}; expected (layers, tokens, channels), none empty")
    size = states.float().abs()
    if median is None:
        median = size.flatten(1).median(dim=1).values
    massive = (size > floor) & (size >= times_median * median[:, None, None])
    energy = size.square() / size.square().sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    for rule, held in (("massive", massive), ("energy", energy >= share)):
        often = held.float().mean(dim=0) >= layers  # (tokens, channels)
        found = often.any(dim=0).nonzero()[:, 0].tolist()
        if found:
            return SinkChannels(channels=tuple(found), rule=rule)
    return SinkChannels(channels=(), rule="none")


def energy_share(states: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Largest share of a token's energy on one of the sink channels, `(…, channels)` → `(…)` float32.

    Kang et al. (2503.03321) ask for max |x_d| / RMS(x) > 20, which at a width of 4,096 is a share of 0.098; as a share
    the rule means the same at every width.

    >>> energy_share(torch.tensor([[3.0, 4.0]]), (1,)).tolist()
    [0.6399999856948853]
    """
    if not channels:
        return torch.zeros(states.shape[:-1], device=states.device)
    square = states.float().square()
    whole = square.sum(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return square[..., list(channels)].amax(dim=-1) / whole


def spike_over_rms(states: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Kang's φ: max |x_d| / RMS(x) over the sink channels, `(…, channels)` → `(…)`; a sink has φ > 20.

    >>> spike_over_rms(torch.tensor([[3.0, 4.0]]), (1,)).round(decimals=4)
    tensor([1.1314])
    """
    return (energy_share(states, channels) * states.shape[-1]).sqrt()


def spike_over_median(states: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Ψ: max |x_d| over the sink channels / median |x| over all tokens and channels `(…, tokens, channels)` →
    `(…, tokens)`; a spike has Ψ ≥ 1000 and |x_d| ≥ 100 (2609.32808).

    >>> spike_over_median(torch.tensor([[1.0, 1.0, 4.0], [1.0, 1.0, 1.0]]), (2,)).tolist()
    [4.0, 1.0]
    """
    size = states.float().abs()
    if not channels or not size.numel():
        return torch.zeros(states.shape[:-1], device=states.device)
    median = size.flatten(-2).median(dim=-1).values.clamp(min=torch.finfo(torch.float32).tiny)
    return size[..., list(channels)].amax(dim=-1) / median[..., None]


def sink_layers(depth: int, *, upto: float = 0.6) -> range:
    """The layers whose inputs are looked at: 2 to ⌊0.6 L⌋; deeper ones drift and flag everything.

    >>> list(sink_layers(8))
    [2, 3, 4]
    """
    return range(min(2, depth - 1), max(int(upto * depth), min(2, depth - 1)) + 1)
