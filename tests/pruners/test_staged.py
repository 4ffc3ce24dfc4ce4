"""Methods of several stages: published budgets, thresholds, and the contract of every stage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners.elastic_cache import ElasticCache
from dart_lab.pruners.mustdrop import MustDrop, MustDropFilter, MustDropWindows
from dart_lab.pruners.pyramiddrop import PyramidDrop, halving
from dart_lab.pruners.raters import above_mean, rater_scores
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.sparsevlm import SparseVLM, SparseVLMStage
from dart_lab.pruners.tome import ToMe, ToMeLLM
from dart_lab.pruners.v2drop import V2Drop, V2DropStage
from dart_lab.testing import check_pruner

AFTER_EACH_STAGE = {  # of 576 tokens, recycled ones counted
    ("v1", 192): [309, 204, 113], ("v1", 128): [312, 117, 39], ("v1", 96): [249, 55, 27], ("v1", 64): [82, 32, 18],
    ("v2", 192): [300, 200, 118], ("v2", 128): [238, 108, 60], ("v2", 96): [246, 54, 28], ("v2", 64): [66, 34, 20],
}


@pytest.mark.parametrize(("version", "keep"), AFTER_EACH_STAGE)
def test_sparsevlm_leaves_what_was_published(version: str, keep: int) -> None:
    left, found = torch.tensor([576]), []
    for part in SparseVLM(keep=keep, version=version).parts():
        assert isinstance(part, SparseVLMStage)
        survivors = part.survivors(left, torch.tensor([576]))
        left = survivors + part.recycled(left - survivors)
        found.append(int(left))
    assert found == AFTER_EACH_STAGE[version, keep]


def test_raters_are_never_none_and_the_same_at_every_stage() -> None:
    ones = torch.ones(1, 3, dtype=torch.bool)
    assert above_mean(torch.full((1, 3), 1 / 3), ones).tolist() == [[True, True, True]]
    assert above_mean(torch.ones(1, 1), ones[:, :1]).tolist() == [[True]]
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(1, n, 6, generator=generator) for n in (5, 4))
    by_hand = torch.softmax(image[0] @ text[0].T, dim=1).mean(dim=0)
    real = torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
    torch.testing.assert_close(rater_scores(image, text, *real)[0], by_hand)
    rows = torch.rand(1, 2, 9, 9, generator=generator)
    full = Signals.of(visual=torch.arange(5)[None], attention=rows, embeds=torch.cat([image, text], dim=1))
    later = Signals.of(
        visual=torch.arange(2)[None], attention=rows[:, :, 3:, 3:], embeds=torch.cat([image[:, :2], text], dim=1),
        image_embeds=image, original=torch.tensor([5]),
    )
    stage = SparseVLMStage(keep=1, recycle=False)
    assert (stage(full).notes["raters"] - 5).tolist() == (stage(later).notes["raters"] - 2).tolist()


def test_recycled_tokens_are_means_of_deleted_ones_behind_the_survivors() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, rows = torch.randn(1, 44, 8, generator=generator), torch.rand(1, 2, 44, 44, generator=generator)
    signals = Signals.of(visual=torch.arange(40)[None], hidden=hidden, embeds=hidden, attention=rows)
    got = SparseVLMStage(keep=4)(signals)  # 36 deleted, 11 in the pool, 2 clusters
    assert got.counts.tolist() == [6] and got.notes["pool"].shape == (1, 11)
    survivors = got.sequence[0, :4]
    assert torch.equal(got.apply(hidden[:, :40])[0, :4], hidden[0, survivors])
    for cluster in range(2):
        inside = got.notes["pool"][0][got.notes["member"][0] == cluster]
        torch.testing.assert_close(got.apply(hidden[:, :40])[0, 4 + cluster], hidden[0, inside].mean(dim=0))


@pytest.mark.parametrize(("average", "tokens", "stages"), [
    (192, 576, (312, 156, 78)), (128, 576, (184, 92, 46)), (64, 576, (56, 28, 14)),
    (640, 2880, (920, 460, 230)), (320, 2880, (280, 140, 70)),
])
def test_pyramid_matched_budgets(average: int, tokens: int, stages: tuple[int, ...]) -> None:
    assert halving(average, tokens, layers=(2, 10, 20), depth=32) == stages
    a, b, c = stages
    assert (2 * tokens + 8 * a + 10 * b + 12 * c) / 32 == average
    with pytest.raises(DartLabError, match="out of reach"):
        halving(160, 2880, layers=(2, 10, 20), depth=32)


def test_pyramid_shares_are_of_the_original_count() -> None:
    rows = torch.rand(1, 2, 12, 12, generator=torch.Generator().manual_seed(0))
    signals = Signals.of(visual=torch.arange(8)[None], attention_ahead=rows, original=torch.tensor([16]))
    last = PyramidDrop().parts()[1]
    got = last(signals)  # a quarter of 16
    expected = rows[0, :, 11, :8].mean(dim=0).topk(4).indices.sort().values
    assert got.keep[0].tolist() == expected.tolist()


def test_v2drop_takes_the_most_changed_and_leaves_one() -> None:
    delta = torch.tensor([3.0, 1.0, -4.0, 0.0, 2.0])[None, :, None]
    signals = Signals.of(visual=torch.arange(5)[None], delta=delta)
    kept = [part(signals).keep[0].tolist() for part in V2Drop().parts()]
    assert kept == [[0, 2], [0, 2], [2]]
    assert V2DropStage(keep=3)(signals).order.tolist() == [[2, 0, 4]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.integers(1, 12), st.floats(0.0, 0.3), st.floats(0.0, 0.3))
def test_mustdrop_drops_by_both_thresholds_and_never_a_key(seed: int, n: int, g: float, h: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(1, 2, n + 3, n + 3, generator=generator) / 4
    keys = torch.rand(1, n, generator=generator) < 0.2
    real = torch.ones(1, n + 3, dtype=torch.bool)
    signals = Signals.of(visual=torch.arange(n)[None], attended=real, attention=rows, key_tokens=keys)
    got = MustDropFilter(global_share=g, individual=h)(signals)
    seen = rows[0, :, n:, :n].mean(dim=0)
    total = float(seen.sum(dim=0).sum())
    for i in range(n):
        drop = float(seen[:, i].sum()) < g * total and float(seen[:, i].max()) < h and not keys[0, i]
        assert bool(got.mask()[0, i]) is not drop
    exact = MustDropFilter(keep=max(1, n // 2), global_share=g, individual=h)(signals)
    assert exact.counts.tolist() == [max(1, n // 2)]


def test_mustdrop_windows_remove_a_window_s_tokens_but_one() -> None:
    place = torch.arange(36)
    grid = torch.stack([0 * place, 0 * place, place // 6, place % 6], dim=1).expand(2, -1, -1)
    hidden = torch.randn(2, 36, 8, generator=torch.Generator().manual_seed(0))
    hidden[0, (place // 6 < 3) & (place % 6 < 3)] = 1.0  # one window alike, in one picture only
    got = MustDropWindows()(Signals.of(visual=place.expand(2, -1), grid=grid, hidden=hidden))
    assert got.counts.tolist() == [36 - 8, 36] and got.sizes[0].max() == 9
    assert torch.equal(got.apply(hidden)[0, 0], torch.ones(8))


def test_faults_are_named() -> None:
    for wrong, words in (
        (lambda: SparseVLM(), "exactly one"), (lambda: SparseVLM(keep=64, layers=(3,)), "3 layers"),
        (lambda: PyramidDrop(keep=8, schedule=(4,)), "not both"), (lambda: V2Drop(schedule=(2.0, 1.0, 1.0)), "shares"),
        (lambda: MustDrop(layers=()), "at least one"), (lambda: ToMe(keep=4, blocks=0), "blocks"),
        (lambda: ToMe(keep=4, r=2), "exactly one"), (lambda: MustDrop(window=1), "window"),
        (lambda: MustDrop()(Signals.of(visual=torch.zeros(1, 1, dtype=torch.int64))), "stages"),
    ):
        with pytest.raises(DartLabError, match=words) as fault:
            wrong()
        assert "\n" not in str(fault.value)
    assert PAD == -1


@pytest.mark.parametrize("method", [
    ToMe(keep=0.5, blocks=5), ToMeLLM(keep=3), SparseVLM(schedule=(0.5,), layers=(3,)),
    SparseVLM(schedule=(0.5,), layers=(3,), version="v2"), PyramidDrop(schedule=(0.5, 0.25), layers=(2, 4)),
    V2Drop(schedule=(0.5, 0.0), layers=(2, 3)), MustDropFilter(keep=0.5), MustDropWindows(window=2, similarity=0.0),
], ids=lambda method: method.name)
def test_contract(method: object) -> None:
    check_pruner(method)


def test_elastic_cache_keeps_its_ends() -> None:
    got = ElasticCache(keep=2)(Signals.of(visual=torch.arange(6)[None], received=torch.rand(1, 6)))
    assert got.keep.tolist() == [[0, 5]]
