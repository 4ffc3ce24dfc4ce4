"""Cuts and channels on planted data: found where they were planted, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.roles.dead_rules import Faint
from dart_lab.roles.fit import Fit
from dart_lab.roles.histogram import Histogram
from dart_lab.roles.llm_rules import LikeFirst, Loud, Received
from dart_lab.roles.sinks import (
    energy_share,
    norm_cut,
    sink_channels,
    sink_layers,
    spike_over_median,
    spike_over_rms,
)
from dart_lab.roles.text_sinks import TextSinks, find_text_sinks
from dart_lab.roles.vit_rules import ColumnSums, Norm, VisionChannels


def one_picture(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(image=np.zeros(tokens, dtype=np.int64))


def histogram(*parts: np.ndarray, width: float = 0.02) -> Histogram:
    seen = Histogram(width)
    for part in parts:
        seen.add(part)
    return seen


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_quantiles_are_right_to_a_bin_and_parts_add_up(values: list[float], share: float) -> None:
    whole, half = (
        histogram(np.array(values), width=0.1),
        histogram(np.array(values[::2]), np.array(values[1::2]), width=0.1),
    )
    assert whole.counts == half.counts and whole.total == len(values)
    exact = np.sort(values)[min(int(np.ceil(share * len(values))) - 1, len(values) - 1)]
    assert abs(whole.quantile(share) - exact) <= 0.1


def test_otsu_equals_brute_force_over_all_cuts() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 1, 700), rng.normal(6, 1, 300)])
    cut = histogram(values, width=0.1).otsu()
    best = max(
        np.arange(values.min(), values.max(), 0.1),
        key=lambda t: (
            (values <= t).mean() * (values > t).mean() * (values[values > t].mean() - values[values <= t].mean()) ** 2
        ),
    )
    assert cut == pytest.approx(best, abs=0.2)


@pytest.mark.parametrize("share", [0.002, 0.005, 0.02, 0.045])
@pytest.mark.parametrize("ratio", [2.0, 4.0])
def test_a_planted_second_mode_is_found_whatever_its_size(share: float, ratio: float) -> None:
    rng = np.random.default_rng(1)
    n = 40_000
    outlying = int(share * n)
    norms = np.log(np.concatenate([rng.normal(40, 4, n - outlying), rng.normal(40 * ratio, 3, outlying)]))
    found = norm_cut(histogram(norms))
    assert found.cut is not None, found.why
    assert (np.exp(norms) > found.cut).sum() == pytest.approx(outlying, rel=0.02)


@pytest.mark.parametrize("draw", ["normal", "lognormal", "uniform", "constant", "two equal halves"])
def test_no_second_mode_is_invented(draw: str) -> None:
    rng = np.random.default_rng(2)
    values = {
        "normal": rng.normal(3.5, 0.1, 40_000),
        "lognormal": np.exp(rng.normal(1.2, 0.15, 40_000)),
        "uniform": rng.uniform(3, 4, 40_000),
        "constant": np.full(100, 3.0),
        "two equal halves": np.concatenate([rng.normal(3, 0.05, 500), rng.normal(4, 0.05, 500)]),
    }[draw]
    assert norm_cut(histogram(values)).cut is None


def test_scale_of_the_norms_scales_the_cut() -> None:
    rng = np.random.default_rng(3)
    norms = np.log(np.concatenate([rng.normal(40, 4, 10_000), rng.normal(160, 3, 50)]))
    first, second = norm_cut(histogram(norms)), norm_cut(histogram(norms + np.log(10)))
    assert first.cut is not None and second.cut is not None
    assert second.cut / first.cut == pytest.approx(10, rel=0.05)


def spiky(channel: int, height: float, layers: int = 6) -> torch.Tensor:
    states = torch.randn(layers, 5, 64, generator=torch.Generator().manual_seed(0))
    states[1:, 2, channel] = height
    return states


def test_channels_that_spike_are_found_by_either_rule() -> None:
    assert sink_channels(spiky(13, 3000.0)).channels == (13,) and sink_channels(spiky(13, 3000.0)).rule == "massive"
    assert sink_channels(spiky(13, 60.0)).channels == (13,) and sink_channels(spiky(13, 60.0)).rule == "energy"
    assert sink_channels(spiky(13, 1.0)).channels == ()
    rare = spiky(13, 3000.0)
    rare[3:] = 0.1
    assert sink_channels(rare).channels == (), "two layers of six are too few"
    with pytest.raises(DartLabError, match="none empty"):
        sink_channels(torch.empty(0, 2, 3))


@given(st.integers(2, 64), st.floats(0.01, 1000))
def test_energy_is_scale_free_and_agrees_with_its_definition(width: int, scale: float) -> None:
    states = torch.randn(7, width, generator=torch.Generator().manual_seed(width))
    share = energy_share(states, (0, 1))
    direct = [max(float(x[d] ** 2) for d in (0, 1)) / float((x**2).sum()) for x in states.double()]
    assert torch.allclose(share.double(), torch.tensor(direct, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(share, energy_share(states * scale, (0, 1)), atol=1e-5)
    rms = states.square().mean(dim=-1).sqrt()
    assert torch.allclose(spike_over_rms(states, (0, 1)), states[:, :2].abs().amax(dim=-1) / rms, atol=1e-4)


def test_spike_over_median_uses_all_tokens() -> None:
    states = torch.ones(2, 3, 9)
    states[0, 1, 4] = -50.0
    assert spike_over_median(states, (4,)).tolist() == [[1.0, 50.0, 1.0], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize(("depth", "expected"), [(32, (2, 19)), (8, (2, 4)), (2, (1, 1)), (30, (2, 18)), (1, (0, 0))])
def test_the_window_of_layers(depth: int, expected: tuple[int, int]) -> None:
    window = sink_layers(depth)
    assert (window[0], window[-1]) == expected and window[-1] < depth


class Speaker:
    """A text model whose states are planted: `<bos>` spikes from layer 4, and channel 3 is large on every token."""

    depth, processor = 20, None

    def __init__(self, from_layer: int, height: float, common: float) -> None:
        self.from_layer, self.height, self.common = from_layer, height, common
        self.processor = SimpleNamespace(tokenizer=Words())

    def states(self, rows: list[list[int]], layers: list[int]) -> list[torch.Tensor]:
        out = []
        for row in rows:
            one = torch.randn(len(layers), len(row), 64, generator=torch.Generator().manual_seed(len(row)))
            one[..., 3] = self.common
            spiking = [number for number, layer in enumerate(layers) if layer >= self.from_layer]
            one[spiking, 0, 3] = self.height
            out.append(one)
        return out


class Words:
    bos_token_id, unk_token_id = 0, 1

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(letter) for letter in text]}


def text_sinks(monkeypatch: pytest.MonkeyPatch, **planted: float) -> TextSinks:
    speaker = Speaker(**planted)
    monkeypatch.setattr("dart_lab.roles.text_sinks.text_states", lambda vlm, rows, layers: vlm.states(rows, layers))
    return find_text_sinks(speaker, Fit())


def test_text_tells_channels_layers_and_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = text_sinks(monkeypatch, from_layer=4, height=5000.0, common=0.1)
    assert found.channels == (3,) and found.layers == tuple(range(4, 13)) and found.energy == 0.10


def test_a_channel_that_is_large_everywhere_moves_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SmolLM2: one channel holds half of every token's energy, and a hundred times more of `<bos>`'s."""
    found = text_sinks(monkeypatch, from_layer=4, height=5000.0, common=8.0)
    ordinary = 64 / (64 + 63)  # of a token's energy, about
    assert found.channels == (3,) and found.energy == pytest.approx((1 + ordinary) / 2, abs=0.1)
    assert "halfway" in found.why


def test_a_channel_that_is_as_large_on_ordinary_text_is_no_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    found = text_sinks(monkeypatch, from_layer=4, height=5000.0, common=4900.0)
    assert found.channels == () and "no LLM sink" in found.why and found.profile["channel"] == 3


def test_roles_by_attention_are_the_loudest_and_the_faintest() -> None:
    book, layers = SimpleNamespace(layers=(2, 3)), (2, 3)
    share = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.04, 0.03, 0.03])
    states = SimpleNamespace(attention=dict.fromkeys(layers, share), embeds=torch.ones(8, 2), tokens=one_picture(8))
    assert Loud().flags(book, states)[0].tolist() == [False] * 8  # 5 times the median of 0.1
    assert Loud(times=4).flags(book, states)[0].tolist() == [True, *[False] * 7]
    few = Faint().flags(book, states)[0].tolist()
    assert few == [False] * 6 + [True] * 2  # 0.03 + 0.03 < 0.08, with 0.04 it is more
    states.attention = dict.fromkeys(layers, torch.tensor([0.72, *[0.04] * 7]))
    assert Loud().flags(book, states)[0].tolist() == [True, *[False] * 7]
    with pytest.raises(DartLabError, match="reads attention"):
        Loud().flags(book, SimpleNamespace(attention={}))


def test_a_norm_of_ones_own_and_the_largest_column_sums() -> None:
    states = SimpleNamespace(vision=torch.tensor([[3.0, 4.0], [0.0, 1.0]]), column_sums=torch.tensor([1.0, 8.0, 2.0]),
                             tokens=one_picture(3))  # fmt: skip
    assert Norm(5).flags(None, states)[0].tolist() == [True, False]
    flag, scores = ColumnSums().flags(None, states)
    assert flag.tolist() == [False, True, False] and scores["vit concentration"].tolist() == [0.5, 4.0, 1.0]
    bare = SimpleNamespace(vision=None, column_sums=None)
    for rule, words in ((Norm(), "merges patches"), (ColumnSums(), "one to one"), (VisionChannels((1,)), "merges")):
        with pytest.raises(DartLabError, match=words):
            rule.flags(None, bare)


def test_vision_channels_given_or_found() -> None:
    states = SimpleNamespace(vision=torch.tensor([[3.0, 4.0, 0.0], [1.0, 0.2, 9.0]]))
    assert VisionChannels((1,), share=0.6).flags(None, states)[0].tolist() == [True, False]
    assert VisionChannels().flags(SimpleNamespace(vit_channels=(2,)), states)[0].tolist() == [False, True]
    assert not VisionChannels().flags(SimpleNamespace(vit_channels=()), states)[0].any()
    with pytest.raises(DartLabError, match="fit it again"):
        VisionChannels().flags(SimpleNamespace(vit_channels=None), states)
    with pytest.raises(DartLabError, match="channels 0 to 2"):
        VisionChannels((3,)).flags(None, states)


def test_received_counts_heads_and_like_first_compares_with_the_first_token() -> None:
    book = SimpleNamespace(layers=(2,))
    heads = torch.tensor([[0.3, 0.31, 0.0], [0.1, 0.9, 0.0]])
    assert Received().flags(book, SimpleNamespace(received={2: heads}))[0].tolist() == [True, True, False]
    assert Received(often=0.6).flags(book, SimpleNamespace(received={2: heads}))[0].tolist() == [False, True, False]
    tokens, first = torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([1.0, 0.0])
    states = SimpleNamespace(layers={2: tokens}, first={2: first})
    assert LikeFirst().flags(book, states)[0].tolist() == [True, False]
    with pytest.raises(DartLabError, match="begins with the picture"):
        LikeFirst().flags(book, SimpleNamespace(layers={2: tokens}, first={}))
