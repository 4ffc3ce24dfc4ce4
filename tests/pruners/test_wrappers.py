"""Windows, the α-score, protection, unions, sequences and schedules, against plain loops and their limiting cases."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.pruners import (
    DART,
    Alpha,
    FastV,
    Protect,
    Random,
    Schedule,
    Signals,
    Then,
    UniformGrid,
    Union,
    Uniqueness,
    Windowed,
    WindowFastV,
    make_pruner,
    parse_pruner,
)
from dart_lab.pruners.reduction import PAD, Merge, Reduction
from dart_lab.pruners.schedule import ShareOfOriginal
from dart_lab.pruners.windows import window_of
from dart_lab.pruners.wrappers import at_layer, narrowed
from dart_lab.testing import check_pruner
from tests.twins import cosine_twin, top_k_twin

Cell = tuple[int, int, int, int]


def raster(rows: int, columns: int, image: int = 0, newlines: bool = False) -> list[Cell]:
    cells: list[Cell] = []
    for row in range(rows):
        cells += [(image, 0, row, column) for column in range(columns)]
        cells += [(image, 0, -1, -1)] if newlines else []
    return cells


def signals_of(*samples: tuple[Sequence[float], Sequence[Cell]], text: int = 2, seed: int = 0) -> Signals:
    """Visual tokens first, then text; `FastV` ranks them by the given scores. Rows are padded on the left."""
    n = max(len(score) for score, _ in samples)
    length = n + text
    visual = torch.full((len(samples), n), PAD)
    grid = torch.full((len(samples), n, 4), -1)
    attended = torch.zeros(len(samples), length, dtype=torch.bool)
    attention = torch.zeros(len(samples), 1, length, length)
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(samples), length, 8, generator=generator)
    keys = torch.randn(len(samples), 2, length, 4, generator=generator)
    for i, (score, cells) in enumerate(samples):
        shift = n - len(score)
        visual[i, : len(score)] = torch.arange(len(score)) + shift
        grid[i, : len(score)] = torch.tensor(cells)
        attended[i, shift:] = True
        attention[i, 0, :, shift:n] = torch.tensor(score)
    states_of = {"hidden": states, "normed": states.flip(2), "keys": keys}
    return Signals.of(visual=visual, attended=attended, grid=grid, attention=attention, **states_of)


def kept(reduction: Reduction, row: int = 0) -> list[int]:
    return [i for i in reduction.keep[row].tolist() if i != PAD]


def ordered(reduction: Reduction, row: int = 0) -> list[int]:
    assert reduction.order is not None
    return [i for i in reduction.order[row].tolist() if i != PAD]


scores = st.integers(0, 6).map(float)  # few values: ties are the rule
grids = st.tuples(st.integers(1, 5), st.integers(1, 6))


# ---- windows


def window_twin(score: Sequence[float], cells: Sequence[Cell], keep: int, window: tuple[int, int]) -> list[int]:
    n, ranked = len(score), top_k_twin(score, len(score))
    tokens: dict[tuple[int, ...], list[int]] = {}
    for token in ranked:
        image, crop, row, column = cells[token]
        place = (image, crop, row // window[0], column // window[1]) if row >= 0 else (-1,)
        tokens.setdefault(place, []).append(token)
    quota = {place: keep * len(own) // n for place, own in tokens.items()}
    left = keep - sum(quota.values())
    queue = sorted(
        (place for place in tokens if quota[place] < len(tokens[place])),
        key=lambda place: (-(keep * len(tokens[place]) % n), ranked.index(tokens[place][quota[place]])),
    )
    for place in queue[:left]:
        quota[place] += 1
    return sorted(token for place, own in tokens.items() for token in own[: quota[place]])


@given(grids, st.tuples(st.integers(1, 3), st.integers(1, 4)), st.booleans(), st.data())
@settings(deadline=None)
def test_windows_agree_with_the_loop_also_in_a_batch(
    shape: tuple[int, int], window: tuple[int, int], newlines: bool, data: st.DataObject
) -> None:
    batch = []
    for cells in (raster(*shape, newlines=newlines), raster(2, 3) + raster(3, 2, image=1)):
        batch.append((data.draw(st.lists(scores, min_size=len(cells), max_size=len(cells))), cells))
    share = data.draw(st.sampled_from([0.2, 0.5, 0.7, 1.0]))
    method = Windowed(FastV(keep=share), window=window)
    together = method(signals_of(*batch))
    for row, (score, cells) in enumerate(batch):
        expected = window_twin(score, cells, max(1, int(len(score) * share + 0.5)), window)
        assert kept(together, row) == expected
        assert kept(method(signals_of((score, cells)))) == expected
        assert ordered(together, row) == [i for i in top_k_twin(score, len(score)) if i in expected]


@given(grids, st.data())
@settings(deadline=None, max_examples=30)
def test_one_window_is_the_plain_method(shape: tuple[int, int], data: st.DataObject) -> None:
    cells = raster(*shape)
    score = data.draw(st.lists(scores, min_size=len(cells), max_size=len(cells)))
    keep = data.draw(st.integers(1, len(cells)))
    signals, plain = signals_of((score, cells)), FastV(keep=keep)
    for size in ({"window": shape}, {"windows": (1, 1)}, {"window": (99, 99)}):
        assert torch.equal(Windowed(plain, **size)(signals).keep, plain(signals).keep)


@pytest.mark.parametrize(("keep", "window"), [(144, (2, 2)), (64, (3, 3)), (16, (6, 6)), (36, (4, 4))])
def test_as_many_tokens_as_windows_are_one_in_each(keep: int, window: tuple[int, int]) -> None:
    score = torch.rand(576, generator=torch.Generator().manual_seed(0)).tolist()
    found = WindowFastV(keep=keep, window=window)(signals_of((score, raster(24, 24))))
    cells = {(i // 24 // window[0], i % 24 // window[1]) for i in kept(found)}
    assert len(cells) == len(kept(found)) == keep


@pytest.mark.parametrize("keep", [32, 64, 128, 144, 192])
def test_default_windows_share_the_usual_budgets_evenly(keep: int) -> None:
    score = torch.arange(576).float().tolist()  # all of the plain method's tokens would lie at the bottom
    found = WindowFastV(keep=keep)(signals_of((score, raster(24, 24))))
    counts = torch.bincount(found.notes["window"][0][found.keep[0]], minlength=16)
    assert counts.tolist() == [keep // 16] * 16


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_a_number_of_windows_cuts_evenly(rows: int, columns: int, down: int, across: int) -> None:
    cells = raster(rows, columns)
    of = window_of(signals_of(([0.0] * len(cells), cells)), windows=(down, across))[0].view(rows, columns)
    heights = torch.unique_consecutive(of[:, 0], return_counts=True)[1]
    widths = torch.unique_consecutive(of[0], return_counts=True)[1]
    assert len(heights) == min(rows, down) and len(widths) == min(columns, across)
    assert heights.max() - heights.min() <= 1 and widths.max() - widths.min() <= 1
    assert of.unique().tolist() == list(range(len(heights) * len(widths)))


def test_newlines_form_one_window_of_their_own_and_images_do_not_mix() -> None:
    cells = raster(2, 2, newlines=True) + raster(2, 2, image=1, newlines=True)
    of = window_of(signals_of(([0.0] * len(cells), cells)), window=(2, 2))[0].tolist()
    assert of == [1, 1, 0, 1, 1, 0, 2, 2, 0, 2, 2, 0]


def test_window_fastv_is_fastv_in_windows() -> None:
    score = torch.rand(40, generator=torch.Generator().manual_seed(1)).tolist()
    signals = signals_of((score, raster(5, 8)))
    for keep in (1, 7, 40, 0.3):
        named = WindowFastV(keep=keep, window=(2, 3))(signals)
        wrapped = Windowed(FastV(keep=keep), window=(2, 3))(signals)
        assert torch.equal(named.keep, wrapped.keep) and torch.equal(named.order, wrapped.order)


def test_unknown_places_are_one_window_and_said_aloud() -> None:
    signals = dataclasses.replace(signals_of(([3.0, 1.0, 2.0], raster(1, 3))), grid=None)
    with pytest.warns(DartLabWarning, match="where the visual tokens lie"):
        assert kept(WindowFastV(keep=2)(signals)) == [0, 2]


def test_a_nan_score_is_refused() -> None:
    with pytest.raises(DartLabError, match="NaN"):
        WindowFastV(keep=1)(signals_of(([1.0, float("nan")], raster(1, 2))))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Windowed(DART(keep=4)), "dart gives no score"),
    (lambda: Windowed(FastV), "give a method, such as"),
    (lambda: Windowed(Schedule("2:fastv:8;4:fastv:4")), "2 stages"),
    (lambda: WindowFastV(keep=4, window=(2, 2), windows=(3, 3)), "not both"),
    (lambda: WindowFastV(keep=4, window=(0, 2)), "whole numbers of at least 1"),
    (lambda: WindowFastV(keep=4, windows=2), "two whole numbers"),
    (lambda: WindowFastV(), "keep is missing"),
    (lambda: make_pruner("window-fastv", keep=4, windwo=(2, 2)), "Did you mean 'window'"),
])
def test_what_windows_refuse(make, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        make()


# ---- wrappers in general


def test_a_wrapper_is_asked_and_placed_like_the_method_it_wraps() -> None:
    wrapped = Windowed(FastV(keep=0.5, layer=5, seed=3), window=(2, 2))
    assert (wrapped.name, wrapped.keep, wrapped.layer, wrapped.seed) == ("window-fastv", 0.5, 5, 3)
    assert wrapped.stage == FastV(keep=1, layer=5).stage
    assert wrapped.needs == FastV.needs and wrapped.parts() == (wrapped,)


def test_parameters_given_to_a_wrapper_replace_those_of_the_method() -> None:
    wrapped = Windowed(FastV(keep=8, layer=5), window=(2, 2), keep=1.0)
    assert (wrapped.keep, wrapped.pruner.keep, wrapped.pruner.layer) == (1.0, 1.0, 5)
    again = dataclasses.replace(wrapped, keep=1)
    assert again.pruner.keep == 1 and isinstance(again.pruner.keep, int)
    assert at_layer(again, 7).stage.layer == 7
    assert at_layer(Union(again, FastV(keep=3, layer=5)), 4).stage.layer == 4


def test_parameters_name_the_wrapped_method() -> None:
    assert Windowed(FastV(keep=8)).parameters()["pruner"]["name"] == "fastv"
    mask = torch.tensor([True, False, True])
    assert Protect(FastV(keep=2), mask=mask).parameters()["mask"] == [[0, 2]]


def test_narrowing_hides_tokens_without_touching_the_rest() -> None:
    signals = signals_of(([1.0, 2.0, 3.0, 4.0], raster(2, 2)))
    rest = narrowed(signals, torch.tensor([[True, False, True, False]]))
    assert rest.visual.tolist() == [[0, 2]] and rest.grid[0, :, 2:].tolist() == [[0, 0], [1, 0]]
    assert rest.attended.tolist() == [[True, False, True, False, True, True]]
    assert rest.text.tolist() == signals.text.tolist() and rest.before.tolist() == [4]


@pytest.mark.parametrize("method", [
    Windowed(FastV(keep=4), window=(2, 2)), WindowFastV(keep=4), WindowFastV(keep=4, query="mean", windows=(2, 3)),
    Alpha(keep=4), Alpha(keep=4, alpha=0.0), Alpha(keep=4, alpha=1, layer=3), Windowed(Alpha(keep=4, alpha=0.2)),
    Alpha(FastV(keep=4), FastV(keep=4, query="mean")), Uniqueness(keep=4), Uniqueness(keep=4, representation="normed"),
    Union(FastV(keep=1), Random(keep=1)), Then(FastV(keep=0.8), DART(keep=0.4)),
    Then(UniformGrid(keep=0.5), FastV(keep=1)),
    Schedule("2:fastv:0.5;8:dart:0.25"),
], ids=lambda method: method.name)
def test_the_contract_holds(method) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_pruner(method)


# ---- α


@given(st.lists(st.floats(2**-20, 1.0, width=32), min_size=1, max_size=12), st.data())
@settings(deadline=None)
def test_the_ends_of_alpha_are_the_two_methods(score: list[float], data: st.DataObject) -> None:
    close = [float(torch.tensor(s).nextafter(torch.tensor(2.0))) for s in score]  # scaling would round these together
    score = [*score, *close]
    keep = data.draw(st.integers(1, len(score)))
    signals = signals_of((score, raster(1, len(score))), seed=data.draw(st.integers(0, 9)))
    for alpha, end in ((1, FastV(keep=keep)), (0, Uniqueness(keep=keep))):
        mixed, alone = Alpha(keep=keep, alpha=alpha)(signals), end(signals)
        assert torch.equal(mixed.keep, alone.keep) and torch.equal(mixed.order, alone.order)
        assert float(mixed.score.min()) >= 0 and float(mixed.score.max()) <= 1


def test_alpha_without_importance_is_dart_with_the_last_token_as_its_one_pivot() -> None:
    signals = signals_of(([1.0] * 30, raster(5, 6)), text=1)
    for keep in (1, 9, 30):
        pivot = DART(keep=keep, image_pivots=0, text_pivots=1)(signals)
        assert torch.equal(Alpha(keep=keep, alpha=0, representation="normed")(signals).keep, pivot.keep)


@given(st.lists(st.floats(0, 1, width=16), min_size=2, max_size=12), st.sampled_from([0.1, 0.3, 0.5, 0.9]))
@settings(deadline=None)
def test_alpha_agrees_with_the_formula(score: list[float], alpha: float) -> None:
    signals = signals_of((score, raster(1, len(score))))
    states = signals.get("hidden")[0]
    unique = [-cosine_twin(states[-1], states[i]) for i in range(len(score))]

    def scaled(values: Sequence[float]) -> list[float]:
        low, high = min(values), max(values)
        return [0.0 if high == low else (v - low) / (high - low) for v in values]

    expected = [alpha * a + (1 - alpha) * b for a, b in zip(scaled(score), scaled(unique), strict=True)]
    found = Alpha(keep=1, alpha=alpha)(signals).score[0]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-6)


def test_a_constant_term_counts_nothing() -> None:
    signals = signals_of(([0.25] * 10, raster(2, 5)))
    assert torch.equal(Alpha(keep=4, alpha=0.7)(signals).keep, Uniqueness(keep=4)(signals).keep)
    one = signals_of(([0.25], raster(1, 1)))
    assert Alpha(keep=1)(one).score.tolist() == [[0.0]]


def test_the_method_without_weight_is_not_asked() -> None:
    assert Alpha(keep=4, alpha=1).needs == {"attention"} and Alpha(keep=4, alpha=0).needs == {"hidden"}
    assert Alpha(keep=4).needs == {"attention", "hidden"}


def test_alpha_of_any_two_methods() -> None:
    signals = signals_of(([1.0, 2.0, 3.0, 4.0], raster(2, 2)))
    same = Alpha(FastV(keep=2), FastV(keep=2), alpha=0.3)
    assert same.keep == 2 and torch.equal(same(signals).keep, FastV(keep=2)(signals).keep)
    assert dataclasses.replace(same, keep=3)(signals).counts.tolist() == [3]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Alpha(keep=4, alpha=1.5), "from 0 to 1"),
    (lambda: Alpha(keep=4, alpha=float("nan")), "from 0 to 1"),
    (lambda: Alpha(keep=4, alpha=True), "from 0 to 1"),
    (lambda: Alpha(), "keep is missing"),
    (lambda: Alpha(FastV(keep=4, layer=3)), "same layer"),
    (lambda: Alpha(keep=4, redundancy=DART(keep=4)), "gives no score"),
    (lambda: Alpha(keep=4, representation="norm"), "Did you mean 'normed'"),
    (lambda: Alpha(keep=4, redundancy=FastV(keep=4), representation="normed"), "default redundancy"),
])
def test_what_alpha_refuses(make, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        make()


@given(st.integers(1, 12), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_uniqueness_is_least_cosine_first(n: int, seed: int) -> None:
    signals = signals_of(([1.0] * n, raster(1, n)), seed=seed)
    states = signals.get("hidden")[0].double()
    similarity = [cosine_twin(states[-1], states[i]) for i in range(n)]
    assert ordered(Uniqueness(keep=n)(signals)) == sorted(range(n), key=lambda i: similarity[i])


# ---- protection


def protect_twin(score: Sequence[float], protected: set[int], keep: int, overflow: str) -> list[int]:
    ranked = top_k_twin(score, len(score))
    if overflow == "additive":
        return sorted(set(ranked[:keep]) | protected)
    if overflow == "rank" and len(protected) >= keep:
        return sorted([i for i in ranked if i in protected][:keep])
    others = [i for i in ranked if i not in protected]
    return sorted(protected | set(others[: max(keep - len(protected), 0)]))


@given(st.data(), st.sampled_from(["rank", "soft", "additive"]))
@settings(deadline=None)
def test_protection_agrees_with_its_definition(data: st.DataObject, overflow: str) -> None:
    sizes = (data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8)))
    keep = data.draw(st.integers(1, min(sizes)))
    batch = [(data.draw(st.lists(scores, min_size=n, max_size=n)), raster(1, n)) for n in sizes]
    mask = torch.tensor([data.draw(st.lists(st.booleans(), min_size=max(sizes), max_size=max(sizes))) for _ in sizes])
    method = Protect(FastV(keep=keep), mask=mask, overflow=overflow)
    found, plain = method(signals_of(*batch)), FastV(keep=keep)(signals_of(*batch))
    for row, (score, _) in enumerate(batch):
        protected = {i for i in range(len(score)) if mask[row, i]}
        assert kept(found, row) == sorted(ordered(found, row)) == protect_twin(score, protected, keep, overflow)
        assert int(found.notes["protected"][row]) == len(protected)
        assert int(found.notes["already"][row]) == len(protected & set(kept(plain, row)))
        assert int(found.asked[row]) == keep


@given(st.integers(0, 50), st.integers(1, 20), st.data())
@settings(deadline=None, max_examples=40)
def test_a_method_without_ranking_swaps_its_last_choices(seed: int, keep: int, data: st.DataObject) -> None:
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=20, max_size=20)))
    protected = set(mask.nonzero()[:, 0].tolist())
    signals = signals_of(([1.0] * 20, raster(4, 5)), text=3, seed=seed)
    for method in (DART(keep=keep), Random(keep=keep, seed=seed)):
        found, plain = Protect(method, mask=mask)(signals), ordered(method(signals))
        assert len(kept(found)) == keep
        if len(protected) <= keep:
            others = [i for i in plain if i not in protected]
            assert set(kept(found)) == protected | set(others[: keep - len(protected)])
        else:
            assert set(kept(found)) < protected


def test_protecting_nothing_or_what_stays_anyway_changes_nothing() -> None:
    signals = signals_of(([1.0] * 20, raster(4, 5)), text=3)
    for method in (DART(keep=9), FastV(keep=9), UniformGrid(keep=9), DART(epsilon=0.1)):
        plain = method(signals)
        for mask in (torch.zeros(20, dtype=torch.bool), plain.mask()[0]):
            for overflow in ("rank", "soft", "additive"):
                assert torch.equal(Protect(method, mask=mask, overflow=overflow)(signals).keep, plain.keep)


def test_a_role_is_a_signal_by_position() -> None:
    signals = signals_of(([4.0, 3.0, 2.0, 1.0], raster(2, 2)))
    alive = torch.tensor([[False, False, False, True, True, True]])
    signals = dataclasses.replace(signals, providers={**signals.providers, "role:alive": lambda: alive})
    method = Protect(FastV(keep=2), role="alive")
    assert method.needs == {"attention", "role:alive"} and kept(method(signals)) == [0, 3]


def test_protection_works_in_windows() -> None:
    score = [float(i) for i in range(16)]
    mask = torch.zeros(16, dtype=torch.bool)
    mask[0] = True
    found = Protect(Windowed(FastV(keep=4), window=(2, 2)), mask=mask)(signals_of((score, raster(4, 4))))
    assert kept(found) == [0, 7, 13, 15]  # of one a window, the lowest score made room


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merging(Random):
    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        found = super().reduce(signals, asked)
        return dataclasses.replace(found, merge=Merge.from_dense(found.weights()))


FOUR = signals_of(([1.0] * 4, raster(2, 2)))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Protect(FastV(keep=2)), "exactly one of mask, role"),
    (lambda: Protect(FastV(keep=2), mask=torch.ones(4)), "tensor of bool"),
    (lambda: Protect(FastV(keep=2), role="dead", overflow="hard"), "overflow='hard'"),
    (lambda: Protect(FastV(keep=2), mask=torch.ones(5, dtype=torch.bool))(FOUR), r"give \(4,\)"),
    (lambda: Protect(Merging(keep=2), mask=torch.ones(4, dtype=torch.bool))(FOUR), "merges"),
    (lambda: Protect(FastV(keep=2), role="dead")(FOUR), "no signal 'role:dead'"),
])
def test_what_protection_refuses(make, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        make()


def test_a_method_that_decides_the_number_cannot_choose_among_too_many() -> None:
    signals, method = signals_of(([1.0] * 20, raster(4, 5))), DART(epsilon=-0.5)
    pruned = ~method(signals).mask()[0]
    with pytest.raises(DartLabError, match="give overflow='soft'"):
        Protect(method, mask=pruned)(signals)
    assert int(Protect(method, mask=pruned, overflow="soft")(signals).counts) == int(pruned.sum())


# ---- unions and sequences


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_a_union_keeps_what_either_keeps(one: int, two: int, seed: int) -> None:
    signals = signals_of((torch.rand(20, generator=torch.Generator().manual_seed(seed)).tolist(), raster(4, 5)))
    a, b = FastV(keep=one), Random(keep=two, seed=seed)
    found, ours, theirs = Union(a, b)(signals), set(kept(a(signals))), set(kept(b(signals)))
    assert set(kept(found)) == ours | theirs and ordered(found)[:one] == ordered(a(signals))
    assert int(found.notes["overlap"][0]) == len(ours & theirs) and found.asked.tolist() == [PAD]


@given(st.integers(2, 20), st.integers(0, 9), st.data())
@settings(deadline=None, max_examples=30)
def test_the_second_method_chooses_among_what_the_first_leaves(many: int, seed: int, data: st.DataObject) -> None:
    few = data.draw(st.integers(1, many))
    score = torch.rand(20, generator=torch.Generator().manual_seed(seed)).tolist()
    signals = signals_of((score, raster(4, 5)))
    first = Random(keep=many, seed=seed)
    found, pool = Then(first, FastV(keep=few))(signals), kept(first(signals))
    assert kept(found) == sorted(sorted(pool, key=lambda i: -score[i])[:few])
    assert Then(first, FastV(keep=few)).asked(signals).tolist() == found.asked.tolist() == [few]
    assert ordered(found) == sorted(pool, key=lambda i: -score[i])[:few]


def test_a_sequence_of_dart_does_not_take_dropped_tokens_for_text() -> None:
    signals = signals_of(([float(20 - i) for i in range(20)], raster(4, 5)), text=2)
    found = Then(FastV(keep=6), DART(keep=3))(signals)  # the last visual tokens go first
    assert set(found.notes["pivots"][0].tolist()) <= {0, 1, 2, 3, 4, 5, 20, 21}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Union(FastV(keep=2), Random(keep=2, layer=3)), "same layer"),
    (lambda: Then(FastV(keep=2), "fastv"), "give a method"),
    (lambda: Union(FastV(keep=2), Merging(keep=2))(FOUR), "merges"),
    (lambda: Then(FastV(keep=2), FastV(keep=3))(FOUR), "only 2 visual tokens"),
])
def test_what_unions_and_sequences_refuse(make, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        make()


# ---- schedules and text


def run_parts(method, n: int) -> list[int]:
    """Tokens after each part, each part seeing what the one before left."""
    signals, counts = signals_of(([float(i) for i in range(n)], raster(1, n)), text=5), []
    for part in method.parts():
        reduction = part(signals)
        counts.append(int(reduction.counts[0]))
        signals = narrowed(signals, reduction.mask())
    return counts


def test_shares_of_the_original_and_of_what_is_left() -> None:
    text = "2:fastv:0.5;8:dart:0.25;9:random:6"
    assert run_parts(Schedule(text), 48) == [24, 12, 6]
    assert run_parts(Schedule(text, share_of="left"), 48) == [24, 6, 6]
    assert run_parts(Schedule({3: FastV(keep=0.5)}), 48) == [24]


def test_a_schedule_moves_its_methods_to_their_layers() -> None:
    schedule = Schedule({2: Windowed(FastV(keep=0.5)), 5: Alpha(keep=0.25), 9: Union(FastV(keep=2), Random(keep=2))})
    assert [part.stage.layer for part in schedule.parts()] == [2, 5, 9]
    assert schedule.stage.layer == 2 and schedule.needs == {"attention", "hidden"}
    assert hash(Schedule("2:fastv:8")) == hash(Schedule({2: FastV(keep=8, layer=7)}))
    assert Schedule("2:fastv:8;4:dart:4").parameters()["stages"][4]["name"] == "dart"
    with pytest.raises(DartLabError, match="acts in 3 stages"):
        schedule(signals_of(([1.0] * 4, raster(2, 2))))


@pytest.mark.parametrize(("stages", "message"), [
    ({}, "give layer → method"),
    ({3: FastV(keep=4), 2: FastV(keep=2)}, "strictly increase"),
    ({0: FastV(keep=4)}, "K ≥ 1"),
    ({2: FastV(keep=0.25), 4: DART(keep=0.5)}, "only shrink"),
    ({2: "fastv"}, "give a method"),
    ("2:fastv:8;2:dart:4", "given twice"),
    ("2:fastv:8;dart:4", "not LAYER:METHOD"),
    ("2:fastw:8", "Did you mean 'fastv'"),
    ("2:fastv:8;4", "not LAYER:METHOD"),
])
def test_what_schedules_refuse(stages, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        Schedule(stages)


def test_an_official_share_of_the_original_is_refused() -> None:
    with pytest.raises(DartLabError, match="share_of='left'"):
        Schedule({2: FastV(keep=0.5), 4: FastV(keep=0.25, budget="official")}).parts()
    with pytest.raises(DartLabError, match="more than the"):
        signals = dataclasses.replace(signals_of(([1.0] * 4, raster(2, 2))), original=torch.tensor([40]))
        ShareOfOriginal(FastV(keep=0.5))(signals)


@pytest.mark.parametrize(("text", "expected"), [
    ("fastv:0.5", FastV(keep=0.5)),
    ("dart:64:image_pivots=2,text_pivots=0,largest=false", DART(keep=64, image_pivots=2, text_pivots=0, largest=False)),
    ("dart:epsilon=0.2", DART(epsilon=0.2)),
    (" window-fastv : 144 : window=2x3 , query=mean ", WindowFastV(keep=144, window=(2, 3), query="mean")),
    ("alpha:144:alpha=0.3,layer=3", Alpha(keep=144, alpha=0.3, layer=3)),
    ("keep-all", make_pruner("keep-all")),
    ("3:fastv:8:query=last_visual;6:random:4", Schedule({3: FastV(keep=8, query="last_visual"), 6: Random(keep=4)})),
])
def test_methods_as_text(text: str, expected) -> None:
    assert parse_pruner(text) == expected


def test_defaults_hold_where_the_text_is_silent() -> None:
    assert parse_pruner("fastv", keep=9, layer=4) == FastV(keep=9, layer=4)
    assert parse_pruner("fastv:3", keep=9, layer=4) == FastV(keep=3, layer=4)
    assert [part.keep for part in parse_pruner("2:fastv:12;4:random", keep=9).parts()] == [12, 9]


@pytest.mark.parametrize(("text", "message"), [
    ("", "is no method"), ("fastv:", "no number"), ("fastv:many", "no number"), ("fastv:8:9", "not PARAMETER=VALUE"),
    ("fastv:8:query", "not PARAMETER=VALUE"), ("fastv:8:query=last:x=1", "is no method"),
    ("fastv:8:keep=9", "given twice"), ("fastv:8:kuery=last", "Did you mean 'query'"),
    ("fastv:true", "no number"), ("fastw:8", "Did you mean 'fastv'"),
])
def test_what_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        parse_pruner(text)
