"""Shares of a budget, the best of every group, outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners.quota import apportion, top_k_by_group, upper_outliers


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=6), st.data())
def test_apportion_spends_all_within_the_limits(groups, data) -> None:
    weights, limits = torch.tensor([float(w) for w, _ in groups]), torch.tensor([limit for _, limit in groups])
    total = data.draw(st.integers(0, int(limits.sum())))
    given_out = apportion(total, weights, limits)
    assert int(given_out.sum()) == total
    assert bool((given_out <= limits).all()) and bool((given_out >= 0).all())
    if float(weights.sum()) > 0:
        ideal = total * weights / weights.sum()
        if bool((ideal.ceil() <= limits).all()):  # nobody is full: largest remainder
            assert bool(((given_out - ideal).abs() < 1 + 1e-6).all())


def test_apportion_by_hand() -> None:
    limits = torch.tensor([100, 100, 100])
    assert apportion(10, torch.tensor([1.0, 1.0, 1.0]), limits).tolist() == [4, 3, 3]
    assert apportion(10, torch.tensor([0.0, 0.0, 0.0]), limits).tolist() == [4, 3, 3]
    assert apportion(12, torch.tensor([8.0, 1.0, 0.0]), torch.tensor([2, 4, 9])).tolist() == [2, 4, 6]
    with pytest.raises(DartLabError, match="cannot share 4 tokens"):
        apportion(4, torch.ones(2), torch.tensor([1, 2]))


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.integers(0, 2)), min_size=1, max_size=12), st.data())
def test_the_best_of_every_group(tokens, data) -> None:
    score, group = torch.tensor([[s for s, _ in tokens]]), torch.tensor([[g for _, g in tokens]])
    members = [[i for i, (_, g) in enumerate(tokens) if g == of] for of in range(3)]
    quotas = [data.draw(st.integers(0, len(m))) for m in members]
    got = top_k_by_group(score, group, torch.tensor([quotas]), torch.ones_like(score, dtype=torch.bool))
    want = {i for m, q in zip(members, quotas, strict=True) for i in sorted(m, key=lambda i: (-tokens[i][0], i))[:q]}
    assert set(got[0].nonzero()[:, 0].tolist()) == want


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=12))
def test_outliers_by_the_textbook(values) -> None:
    first, third = np.quantile(np.float32(values), [0.25, 0.75])
    bound = third + 1.5 * (third - first)
    padded = torch.tensor([[*values, math.nan, 1e9]])
    valid = torch.tensor([[True] * len(values) + [False, False]])
    got = upper_outliers(padded, valid)[0].tolist()
    assert got[-2:] == [False, False]
    for value, found in zip(values, got, strict=False):
        if not math.isclose(value, bound, rel_tol=1e-4, abs_tol=1e-4):
            assert found == (value > bound)
