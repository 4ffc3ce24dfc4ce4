"""DART against a plain greedy loop, its invariants, its budgets and what it certifies."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, Signals
from dart_lab.pruners.dart_certificate import covering, duplication_margin
from dart_lab.pruners.dart_pivots import cpython_set_order, pivot_scores
from dart_lab.pruners.dart_quota import exact_quota, official_quota
from tests.twins import cosine_twin, dart_twin

CHANNELS, KV_HEADS, HEAD_DIM = 6, 2, 4


def signals_of(n: int, before: int = 2, after: int = 5, seed: int = 0, batch: int = 1) -> Signals:
    generator = torch.Generator().manual_seed(seed)
    length = before + n + after
    return Signals.of(
        visual=torch.arange(before, before + n).expand(batch, -1),
        normed=torch.randn(batch, length, CHANNELS, generator=generator),
        keys=torch.randn(batch, KV_HEADS, length, HEAD_DIM, generator=generator),
        values=torch.randn(batch, KV_HEADS, length, HEAD_DIM, generator=generator),
        attention=torch.rand(batch, 4, length, length, generator=generator),
    )


def replaced(signals: Signals, **tensors: torch.Tensor) -> Signals:
    kept = {name: signals.get(name) for name in ("normed", "keys", "values")}
    return Signals.of(visual=signals.visual, attended=signals.attended, **(kept | tensors))


# ---- the algorithm


@given(
    n=st.integers(1, 12), after=st.integers(0, 5), image=st.integers(0, 4), text=st.integers(0, 4),
    seed=st.integers(0, 999), data=st.data(),
)
def test_equals_the_greedy_loop(n, after, image, text, seed, data) -> None:
    image = max(image, int(min(text, after) == 0))  # at least one pivot
    keep = data.draw(st.integers(1, n))
    signals = signals_of(n, after=after, seed=seed)
    got = DART(keep=keep, image_pivots=image, text_pivots=text)(signals)

    images, texts = min(image, n, keep), min(text, after)
    pivots, rest = images + texts, keep - images
    quotas = [rest // pivots + (i < rest % pivots) for i in range(pivots)]
    want = dart_twin(signals.get("normed")[0], signals.get("keys")[0], range(2, 2 + n), quotas=quotas,
                     image_pivots=images, text_pivots=texts)
    assert [i + 2 for i in got.keep[0].tolist()] == want
    assert got.notes["quota"][0].tolist() == quotas


@given(n=st.integers(1, 12), epsilon=st.floats(-0.9, 0.99), seed=st.integers(0, 999))
def test_epsilon_gives_the_papers_sets(n, epsilon, seed) -> None:
    signals = signals_of(n, seed=seed)
    got = DART(epsilon=epsilon)(signals)
    pivots = got.notes["pivots"][0].tolist()
    states = signals.get("normed")[0]
    similarity = {s: [cosine_twin(states[p], states[s]) for p in pivots] for s in range(2, 2 + n)}
    if any(abs(c - epsilon) < 1e-6 for cs in similarity.values() for c in cs):
        return  # too close to the threshold for float32 to agree
    want = [s - 2 for s, cs in similarity.items() if s in pivots or min(cs) <= epsilon]
    assert got.keep[0].tolist() == want
    assert got.asked.tolist() == [-1]


def test_a_larger_epsilon_keeps_more() -> None:
    signals = signals_of(200)
    kept = [set(DART(epsilon=epsilon)(signals).keep[0].tolist()) for epsilon in (-1.0, -0.8, -0.5, 0.0, 1.0)]
    assert all(small <= large for small, large in pairwise(kept))
    assert len(kept[0]) == 4  # the image pivots
    assert len(kept[-1]) == 200


@pytest.mark.parametrize("kind", ["k_norm", "v_norm", "attention"])
def test_pivots_rank_by_the_named_score(kind) -> None:
    signals = signals_of(30, seed=3)
    if kind == "attention":
        by_token = signals.attention(signals.last[:, None])[0, :, 0].mean(dim=0)
    else:
        by_token = signals.get("keys" if kind == "k_norm" else "values")[0].abs().sum(dim=(0, 2))
    for largest in (True, False):
        got = DART(keep=12, pivots=kind, largest=largest, image_pivots=3, text_pivots=2)(signals)
        image = (2 + by_token[2:32].argsort(descending=largest)[:3]).tolist()
        text = (32 + by_token[32:].argsort(descending=largest)[:2]).tolist()
        assert got.notes["pivots"][0].tolist() == image + text
        assert [i + 2 for i in got.order[0, :3].tolist()] == image


def test_random_pivots_follow_the_seed_and_are_fair() -> None:
    signals = signals_of(10)
    image, text = torch.zeros(10), torch.zeros(5)
    for seed in range(2000):
        scores = pivot_scores(signals, "random", seed)
        image[scores[0][0].topk(2).indices] += 1
        text[scores[1][0].topk(1).indices] += 1
    # 400 ± 18 draws of each token; five standard deviations
    assert (image - 400).abs().max() < 90 and (text - 400).abs().max() < 90
    pivots = [DART(keep=5, pivots="random", seed=seed)(signals).notes["pivots"].tolist() for seed in (1, 1, 2)]
    assert pivots[0] == pivots[1] != pivots[2]


def test_needs_follow_the_pivots() -> None:
    assert DART(keep=1).needs == {"normed", "keys"}
    assert DART(keep=1, pivots="v_norm").needs == {"normed", "values"}
    assert DART(keep=1, pivots="random").needs == {"normed"}


# ---- invariances


def test_scaling_states_or_keys_changes_nothing() -> None:
    signals = signals_of(60, seed=5)
    pruner = DART(keep=20)
    want = pruner(signals).keep
    for factor in (1 / 1024, 512.0):  # powers of two are exact in floating point
        assert torch.equal(want, pruner(replaced(signals, normed=signals.get("normed") * factor)).keep)
        assert torch.equal(want, pruner(replaced(signals, keys=signals.get("keys") * factor)).keep)


def test_head_order_means_nothing() -> None:
    signals = signals_of(60, seed=6)
    flipped = replaced(signals, keys=signals.get("keys").flip(1))
    assert torch.equal(DART(keep=20)(signals).keep, DART(keep=20)(flipped).keep)


def test_copies_of_a_pivot_are_kept_last() -> None:
    signals = signals_of(40, seed=7)
    states = signals.get("normed").clone()
    pivot = int(DART(keep=20)(signals).order[0, 0]) + 2
    copies = [s for s in range(2, 42) if s % 3 == 0 and s != pivot][:8]
    states[0, copies] = states[0, pivot].clone()
    pruner = DART(keep=20, image_pivots=1, text_pivots=0)
    got = pruner(replaced(signals, normed=states))
    assert int(got.order[0, 0]) + 2 == pivot
    assert not set(copies) & {i + 2 for i in got.keep[0].tolist()}
    everything = DART(keep=40, image_pivots=1, text_pivots=0)(replaced(signals, normed=states))
    assert {i + 2 for i in everything.order[0, -8:].tolist()} == set(copies)


def test_the_question_counts_only_through_text_pivots() -> None:
    signals = signals_of(60, after=8, seed=8)
    changed = {name: signals.get(name).clone() for name in ("normed", "keys")}
    generator = torch.Generator().manual_seed(99)
    changed["normed"][:, 62:] = torch.randn(1, 8, CHANNELS, generator=generator)
    changed["keys"][:, :, 62:] = torch.randn(1, KV_HEADS, 8, HEAD_DIM, generator=generator)
    other = replaced(signals, **changed)
    assert torch.equal(DART(keep=20, text_pivots=0)(signals).keep, DART(keep=20, text_pivots=0)(other).keep)
    assert not torch.equal(DART(keep=20)(signals).keep, DART(keep=20)(other).keep)


def test_text_before_the_image_is_never_a_pivot() -> None:
    signals = signals_of(20, before=6, seed=9)
    keys = signals.get("keys").clone()
    keys[:, :, :6] *= 1024
    assert int(DART(keep=10)(replaced(signals, keys=keys)).notes["pivots"].min()) >= 6


@pytest.mark.parametrize(("length", "channels"), [(40, 64), (333, 256), (673, 64)])
def test_copies_tie_exactly_and_go_by_index(length, channels) -> None:
    """Copies of a token get equal bits wherever they stand, also beside padding, so that the lower index wins."""
    generator = torch.Generator().manual_seed(length)
    states = torch.randn(1, length, channels, generator=generator)
    states[0, ::3] = states[0, 0].clone()
    keys = torch.randn(1, 2, length, 4, generator=generator)
    n = length - 8
    alone = DART(keep=0.7)(Signals.of(visual=torch.arange(n)[None], normed=states, keys=keys))
    assert alone.score[0, ::3].unique().numel() == 1
    order = alone.order[0].tolist()
    copies = [i for i in order[4:] if i % 3 == 0]
    quotas = alone.notes["quota"][0].cumsum(0)
    for start, end in pairwise([0, *quotas.tolist()]):  # within a pivot's picks, and so from pick to pick
        round_ = [i for i in order[4:][start:end] if i % 3 == 0]
        assert round_ == sorted(round_)
    assert copies == sorted(copies)
    padded = Signals.of(
        visual=torch.stack([torch.arange(n) + 13, torch.arange(n) + 13]),
        attended=torch.arange(length + 13).expand(2, -1) >= 13,
        normed=torch.cat([torch.randn(2, 13, channels), states.expand(2, -1, -1)], dim=1),
        keys=torch.cat([torch.randn(2, 2, 13, 4), keys.expand(2, -1, -1, -1)], dim=2),
    )
    beside = DART(keep=0.7)(padded)
    assert torch.equal(beside.order, alone.order.expand(2, -1))
    assert torch.equal(beside.score[0], alone.score[0])


def test_equal_tokens_go_to_the_lower_index() -> None:
    signals = Signals.of(visual=torch.arange(12)[None], normed=torch.ones(1, 14, 4), keys=torch.ones(1, 1, 14, 4))
    got = DART(keep=7)(signals)
    assert got.keep[0].tolist() == list(range(7))


# ---- budgets

# Kept visual tokens of the released code, from `dart_kept_image_tokens` of the published figures: path, visual tokens,
# nominal number or removed share, tokens a pivot, kept.
PUBLISHED = [
    ("llava", 576, 192, 24, 196), ("llava", 576, 128, 16, 132), ("llava", 576, 64, 8, 68), ("llava", 576, 100, 12, 100),
    ("llava_next", 2880, 320, 40, 324), ("llava", 576, 0.667, 23, 188), ("llava", 576, 0.778, 15, 124),
    ("llava", 576, 0.889, 7, 60), ("llava", 2880, 0.889, 39, 316), ("llava", 1000, 0.778, 27, 220),
]


@pytest.mark.parametrize(("path", "n", "nominal", "quota", "kept"), PUBLISHED)
def test_official_budgets_are_the_published_ones(path, n, nominal, quota, kept) -> None:
    asked = {"keep": nominal} if isinstance(nominal, int) else {"reduction_ratio": nominal}
    got = DART(budget="official", official_path=path, **asked)(signals_of(n))
    assert got.counts.tolist() == [kept]
    assert got.notes["quota"].unique().tolist() == [quota]


@given(n=st.integers(1, 40), keep=st.integers(1, 40), text=st.integers(0, 6))
def test_the_exact_budget_is_exact(n, keep, text) -> None:
    keep = min(n, keep)
    got = DART(keep=keep, text_pivots=text)(signals_of(n))
    assert got.counts.tolist() == [keep]
    quota = got.notes["quota"][0]
    assert int(quota.max() - quota.min()) <= 1
    assert quota.tolist() == sorted(quota.tolist(), reverse=True)  # the remainder goes to the first pivots


def test_few_tokens_are_the_strongest_image_pivots() -> None:
    signals = signals_of(50)
    strongest = pivot_scores(signals, "k_norm", 0)[0][0].argsort(descending=True)[:3]
    assert DART(keep=3)(signals).keep[0].tolist() == sorted(strongest.tolist())


def test_next_clamps_what_llava_refuses() -> None:
    signals = signals_of(300)
    got = DART(keep=320, budget="official", official_path="llava_next")(signals)
    assert got.counts.tolist() == [300] and got.asked.tolist() == [320]
    with pytest.raises(DartLabError, match=r"give keep=303 or less"):
        DART(keep=320, budget="official")(signals)
    assert DART(keep=303, budget="official")(signals).counts.tolist() == [300]


@given(n=st.integers(4, 60), share=st.floats(0.01, 1.0))
def test_a_refused_share_names_one_that_works(n, share) -> None:
    try:
        DART(keep=share, budget="official")(signals_of(n))
    except DartLabError as error:
        nearest = float(str(error).split("give keep=")[1].split()[0])
        kept = DART(keep=nearest, budget="official")(signals_of(n)).counts.item() if nearest else 4
        assert n - 8 < kept <= n


def test_epic_gives_the_last_pivots_what_is_left() -> None:
    quota = official_quota(1.0, torch.tensor([104]), 4, torch.ones(1, 8, dtype=torch.bool), "epic")
    assert quota.tolist() == [[13] * 7 + [9]]


def test_exact_quota_skips_missing_pivots() -> None:
    real = torch.tensor([[True, False, True], [False, False, True]])
    assert exact_quota(torch.tensor([5, 5]), real).tolist() == [[3, 0, 2], [0, 0, 5]]


def test_a_batch_shares_nothing() -> None:
    """Rows of different length, image and question, padded on the left: each as alone, pivot order included."""
    rows = [signals_of(20, before=3, after=6, seed=1), signals_of(11, before=1, after=2, seed=2)]
    length, shift = 29, 29 - 14
    visual = torch.full((2, 20), -1)
    visual[0], visual[1, :11] = torch.arange(3, 23), torch.arange(1, 12) + shift
    attended = torch.ones(2, length, dtype=torch.bool)
    attended[1, :shift] = False
    normed, keys = torch.full((2, length, CHANNELS), 7.0), torch.full((2, KV_HEADS, length, HEAD_DIM), 1e4)
    normed[0], keys[0] = rows[0].get("normed")[0], rows[0].get("keys")[0]
    normed[1, shift:], keys[1, :, shift:] = rows[1].get("normed")[0], rows[1].get("keys")[0]
    together = Signals.of(visual=visual, attended=attended, normed=normed, keys=keys)
    for pruner in (DART(keep=0.5), DART(keep=9), DART(epsilon=0.1), DART(keep=0.5, pivot_order="cpython_set")):
        got = pruner(together)
        for i, alone in enumerate(rows):
            want = pruner(alone)
            assert got.keep[i, : int(got.counts[i])].tolist() == want.keep[0].tolist()
            offset = shift if i else 0
            assert [p - offset for p in got.notes["pivots"][i].tolist() if p >= 0] == want.notes["pivots"][0].tolist()


# ---- order of the pivots


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40, unique=True))
def test_set_order_is_that_of_a_real_set(positions) -> None:
    attended = torch.ones(1, 3001, dtype=torch.bool)
    got = cpython_set_order(torch.tensor([[*positions, -1]]), attended)
    assert got[0].tolist() == [*set(positions), -1]


def test_the_official_budget_takes_the_official_order() -> None:
    signals = signals_of(80)
    by_set = DART(keep=30, budget="official")(signals)
    assert torch.equal(by_set.keep, DART(keep=30, budget="official", pivot_order="cpython_set")(signals).keep)
    by_score = DART(keep=30, budget="official", pivot_order="score")(signals)
    assert torch.equal(by_score.notes["pivots"], DART(keep=30)(signals).notes["pivots"])


# ---- the certificate


@given(n=st.integers(2, 60), keep=st.integers(1, 60), seed=st.integers(0, 99))
def test_every_pruned_token_resembles_every_pivot(n, keep, seed) -> None:
    keep = min(keep, n)
    signals = signals_of(n, seed=seed)
    got = DART(keep=keep)(signals)
    states = signals.get("normed")[0]
    epsilon = got.notes["epsilon"][0].tolist()
    pruned = set(range(n)) - set(got.keep[0].tolist())
    smallest = math.inf
    for x in pruned:
        for pivot, bound in zip(got.notes["pivots"][0].tolist(), epsilon, strict=True):
            duplication = cosine_twin(states[pivot], states[x + 2])
            assert duplication >= bound - 1e-6
            smallest = min(smallest, duplication - bound)
    assert float(got.notes["margin"][0]) >= 0 or not pruned
    assert float(got.notes["margin"][0]) == pytest.approx(smallest, abs=1e-5)


@given(n=st.integers(6, 40), keep=st.integers(1, 40), seed=st.integers(0, 99))
def test_lemma_holds_where_norms_are_equal(n, keep, seed) -> None:
    signals = signals_of(n, seed=seed)
    states = torch.nn.functional.normalize(signals.get("normed"), dim=-1) * math.sqrt(CHANNELS)
    notes = DART(keep=min(keep, n), certificate=True)(replaced(signals, normed=states)).notes
    assert bool(notes["equal_norms"][0])
    assert float(notes["hausdorff"][0]) <= float(notes["bound"][0]) + 1e-4
    assert float(notes["hausdorff"][0]) <= float(notes["hausdorff_visual"][0]) + 1e-6


def test_hausdorff_distance_is_that_of_a_plain_loop() -> None:
    signals = signals_of(30, seed=4)
    got = DART(keep=9, certificate=True)(signals)
    states, kept = signals.get("normed")[0], got.keep[0].tolist()
    to_kept = [min(float((states[x + 2] - states[k + 2]).norm()) for k in kept) for x in range(30)]
    anchors = [k + 2 for k in kept] + got.notes["pivots"][0].tolist()
    to_any = [min(float((states[x + 2] - states[a]).norm()) for a in anchors) for x in range(30)]
    assert float(got.notes["hausdorff_visual"][0]) == pytest.approx(max(to_kept), rel=1e-5)
    assert float(got.notes["hausdorff"][0]) == pytest.approx(max(to_any), rel=1e-5)


def test_lemma_fails_for_unequal_norms() -> None:
    """The counter-example to bounded norms alone: x = p/100 has cosine 1 with p and is 0.99 B away."""
    pivot = torch.tensor([1.0, 0.0])
    found = covering(
        tokens=torch.stack([pivot, pivot / 100])[None], kept=torch.tensor([[True, False]]),
        pruned=torch.tensor([[False, True]]), pivots=pivot[None, None], epsilon=torch.tensor([[0.99]]),
    )
    assert float(found["hausdorff"][0]) == pytest.approx(0.99)
    assert float(found["bound"][0]) == pytest.approx(math.sqrt(0.02))
    assert not bool(found["equal_norms"][0])


def test_nothing_pruned_is_certified_trivially() -> None:
    notes = DART(keep=12, certificate=True)(signals_of(12)).notes
    assert float(notes["margin"][0]) == math.inf and float(notes["hausdorff"][0]) == 0.0
    no_pivot = duplication_margin(torch.zeros(1, 0, 3), torch.zeros(1, 0), torch.ones(1, 3, dtype=torch.bool))
    assert float(no_pivot) == math.inf


# ---- errors


@pytest.mark.parametrize(("parameters", "text"), [
    ({}, "keep is missing"),
    ({"keep": 8, "epsilon": 0.5}, "exactly one of keep, epsilon, reduction_ratio; got keep=8 and epsilon=0.5"),
    ({"keep": 8, "pivots": "knorm"}, "Did you mean 'k_norm'"),
    ({"keep": 8, "pivot_order": "set"}, "pivot_order='set'"),
    ({"keep": 8, "official_path": "next"}, "Did you mean 'llava_next'"),
    ({"keep": 8, "image_pivots": 0, "text_pivots": 0}, "at least one pivot"),
    ({"keep": 8, "image_pivots": -1}, "image_pivots=-1"),
    ({"keep": 8, "text_pivots": 1.5}, "text_pivots=1.5"),
    ({"reduction_ratio": 0.778}, "keep=0.222"),
    ({"reduction_ratio": 1.2, "budget": "official"}, "from 0 to 1"),
    ({"epsilon": 1.5}, "cosine in"),
    ({"epsilon": 0.5, "budget": "official"}, "budget='exact'"),
    ({"keep": 8, "layer": 0}, "K ≥ 1"),
])
def test_wrong_parameters_are_refused(parameters, text) -> None:
    with pytest.raises(DartLabError, match=text) as caught:
        DART(**parameters)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("pruner", "n", "after", "text"), [
    (DART(keep=8, image_pivots=0), 20, 0, "no pivot"),
    (DART(keep=8, budget="official"), 20, 3, "text_pivots=3"),
    (DART(keep=8, budget="official"), 3, 6, "give at most 3"),
    (DART(keep=1.0, budget="official"), 104, 8, "give keep=0.9231 or less"),
    (DART(keep=21), 20, 5, "give at most 20"),
])
def test_infeasible_inputs_are_refused(pruner, n, after, text) -> None:
    with pytest.raises(DartLabError, match=text) as caught:
        pruner(signals_of(n, after=after))
    assert "\n" not in str(caught.value)


def test_nan_in_the_states_is_named() -> None:
    signals = signals_of(20)
    states = signals.get("normed").clone()
    states[0, 5] = math.nan
    with pytest.raises(DartLabError, match="NaN"):
        DART(keep=8)(replaced(signals, normed=states))
