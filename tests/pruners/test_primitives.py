"""Selectors, budgets, signals and reductions, held against plain loops."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import KeepAll, Random, Reduction, Signals
from dart_lab.pruners.budget import resolve_keep
from dart_lab.pruners.reduction import mask_to_rows, rows_to_mask
from dart_lab.pruners.selectors import ascending, cosine, min_max, padding_last, top_k
from tests.twins import cosine_twin, top_k_twin

SCORES = st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12)


@given(rows=st.lists(SCORES, min_size=1, max_size=4), data=st.data())
def test_top_k_equals_sorting_by_score_then_place(rows, data) -> None:
    width = max(map(len, rows))
    counts = [data.draw(st.integers(0, len(row))) for row in rows]
    score = torch.tensor([[*row, *[9.0] * (width - len(row))] for row in rows])
    valid = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    got = top_k(score, torch.tensor(counts), valid)
    for row, count, indices in zip(rows, counts, got.tolist(), strict=True):
        assert indices[:count] == top_k_twin(row, count)
        assert set(indices[count:]) <= {-1}


def test_top_k_names_what_is_wrong() -> None:
    valid = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(DartLabError, match="NaN"):
        top_k(torch.tensor([[1.0, math.nan, 2.0]]), torch.tensor([1]), valid)
    with pytest.raises(DartLabError, match=r"asked for \[4\] tokens of rows that offer \[3\]"):
        top_k(torch.zeros(1, 3), torch.tensor([4]), valid)
    valid[0, 1] = False  # NaN in padding is no fault
    assert top_k(torch.tensor([[1.0, math.nan, 2.0]]), torch.tensor([2]), valid).tolist() == [[2, 0]]


def test_top_k_decides_half_precision_in_float32() -> None:
    score = torch.tensor([[4096.0, 4100.0]], dtype=torch.float16)
    assert top_k(score, torch.tensor([1]), torch.ones(1, 2, dtype=torch.bool)).tolist() == [[1]]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_masks_and_rows_are_inverse(masks) -> None:
    mask = torch.tensor(masks)
    rows = mask_to_rows(mask)
    assert [[i for i in row if i >= 0] for row in rows.tolist()] == [[i for i, on in enumerate(m) if on] for m in masks]
    assert torch.equal(rows_to_mask(rows, 5), mask)
    assert torch.equal(rows_to_mask(rows.flip(1), 5), mask)
    assert torch.equal(ascending(rows.flip(1)), rows)
    assert torch.equal(padding_last(rows), rows)


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8))
def test_min_max_ends_at_zero_and_one(values) -> None:
    got = min_max(torch.tensor([[*values, 1e6]]), torch.tensor([[True] * len(values) + [False]]))[0]
    span = max(values) - min(values)
    want = [(v - min(values)) / span if span else 0.0 for v in values]
    torch.testing.assert_close(got[:-1], torch.tensor(want), atol=1e-5, rtol=1e-5)
    assert float(got[-1]) == 0.0


def test_cosine_equals_a_plain_loop() -> None:
    a, b = torch.randn(2, 3, 5), torch.randn(2, 4, 5)
    got = cosine(a, b)
    for row in range(2):
        for i in range(3):
            for j in range(4):
                assert float(got[row, i, j]) == pytest.approx(cosine_twin(a[row, i], b[row, j]), abs=1e-6)


# ---- budgets


@given(keep=st.floats(0.001, 1.0), size=st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_a_ratio_is_rounded_half_up_and_never_zero(keep, size) -> None:
    got = resolve_keep(keep, torch.tensor(size)).tolist()
    assert got == [min(max(math.floor(n * keep + 0.5), 1), n) for n in size]


@pytest.mark.parametrize(("keep", "text"), [
    (0, "at least 1"), (-3, "at least 1"), (0.0, "retention ratio"), (1.5, "whole number"),
    (math.nan, "retention ratio"), (True, "keep=True"), ("128", "keep='128'"), ([1], "number of visual tokens"),
])
def test_a_wrong_keep_is_refused(keep, text) -> None:
    for attempt in (lambda: Random(keep=keep), lambda: resolve_keep(keep, torch.tensor([9]))):
        with pytest.raises(DartLabError, match=text):
            attempt()


def test_more_than_there_is_names_the_smallest_sample() -> None:
    with pytest.raises(DartLabError, match=r"keep=8 .* give at most 5"):
        resolve_keep(8, torch.tensor([9, 7, 5]))


# ---- signals


def test_text_and_last_are_found_beside_padding() -> None:
    attended = torch.tensor([[False, False, *[True] * 4], [True] * 6, [*[True] * 4, False, False]])
    signals = Signals.of(visual=torch.tensor([[3, 4], [1, 4], [1, -1]]), attended=attended)
    assert signals.counts.tolist() == [2, 2, 1]
    assert signals.text.tolist() == [[5, -1], [5, -1], [2, 3]]
    assert signals.last.tolist() == [5, 5, 3]


def test_a_signal_is_computed_once_and_only_when_asked_for() -> None:
    calls = []
    signals = Signals(visual=torch.tensor([[0]]), attended=torch.ones(1, 2, dtype=torch.bool),
                      providers={"hidden": lambda: calls.append(1) or torch.zeros(1, 2, 3)})
    assert not calls
    assert signals.get("hidden") is signals.get("hidden")
    assert len(calls) == 1
    with pytest.raises(DartLabError, match="Did you mean 'hidden'"):
        signals.get("hiden")


def test_attention_to_visual_picks_columns_and_blanks_padding() -> None:
    attention = torch.rand(2, 3, 6, 6)
    signals = Signals.of(visual=torch.tensor([[1, 2, 4], [0, 5, -1]]), attention=attention)
    got = signals.attention_to_visual(torch.tensor([[5], [2]]))
    torch.testing.assert_close(got[0, :, 0], attention[0, :, 5, [1, 2, 4]])
    torch.testing.assert_close(got[1, :, 0, :2], attention[1, :, 2, [0, 5]])
    assert got[1, :, 0, 2].abs().sum() == 0


def test_generators_differ_by_sample_and_by_seed() -> None:
    signals = Signals.of(visual=torch.zeros(2, 1, dtype=torch.int64), sample_seeds=(3, 4))

    def draw(sample: int, seed: int) -> list[float]:
        return torch.rand(4, generator=signals.generator(sample, seed)).tolist()

    assert draw(0, 0) == draw(0, 0)
    assert len({tuple(draw(sample, seed)) for sample in (0, 1) for seed in (0, 1)}) == 4


# ---- reductions


def test_counts_and_mask() -> None:
    found = Reduction(keep=torch.tensor([[0, 3], [1, -1]]), size=torch.tensor([4, 2]), asked=torch.tensor([2, 1]))
    assert found.counts.tolist() == [2, 1]
    assert found.mask().tolist() == [[True, False, False, True], [False, True, False, False]]


@pytest.mark.parametrize(("keep", "text"), [
    ([[0, 0]], "duplicate"), ([[2, 1]], "unsorted"), ([[0, 4]], "out of span"), ([[-1, 2]], "padding"),
    ([[-2, 1]], "out of span"),
])
def test_a_wrong_set_is_named(keep, text) -> None:
    found = Reduction(keep=torch.tensor(keep), size=torch.tensor([4]), asked=torch.tensor([2]))
    with pytest.raises(DartLabError, match=text):
        found.check(size=torch.tensor([4]), method="mine")


def test_wrong_types_and_sizes_are_named() -> None:
    size = torch.tensor([4])
    with pytest.raises(DartLabError, match="int64"):
        Reduction(keep=torch.tensor([[0.0]]), size=size, asked=size).check(size=size, method="mine")
    with pytest.raises(DartLabError, match="text would be dropped"):
        Reduction(keep=torch.tensor([[0]]), size=torch.tensor([9]), asked=size).check(size=size, method="mine")


def test_methods_are_frozen_and_keyword_only() -> None:
    with pytest.raises(TypeError):
        Random(4)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        KeepAll().layer = 3  # type: ignore[misc]
    assert Random(keep=4).parameters() == {"keep": 4, "layer": 2, "seed": 0, "budget": "exact"}
