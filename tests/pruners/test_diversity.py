"""Greedy selectors against brute force: farthest point, DPP-MAP, facility location."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.diversity import cosine_distance, dpp_map, facility_location, farthest_point, isolation
from dart_lab.pruners.selectors import cosine

SIZES = st.integers(1, 10)
SEEDS = st.integers(0, 2**31)


def states(n: int, seed: int, channels: int = 4) -> Tensor:
    return torch.randn(1, n, channels, generator=torch.Generator().manual_seed(seed))


def everything(n: int) -> Tensor:
    return torch.ones(1, n, dtype=torch.bool)


def ragged(sizes: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """States of several samples, padded with numbers that must not matter, and what is valid."""
    out = torch.full((len(sizes), max(sizes), 4), 7.0)
    valid = torch.zeros(out.shape[:2], dtype=torch.bool)
    for i, n in enumerate(sizes):
        out[i, :n] = states(n, seed + i)[0]
        valid[i, :n] = True
    return out, valid


def farthest_twin(distance: np.ndarray, count: int, pivots: list[int] | None) -> list[int]:
    """Position by position: the most isolated token (without pivots), then the farthest from those taken."""
    n, taken = len(distance), list(pivots or [])
    for _ in range(count):
        free = [i for i in range(n) if i not in taken]
        if taken:
            reach = {i: min(distance[i, j] for j in taken) for i in free}
        else:
            reach = {i: min((distance[i, j] for j in range(n) if j != i), default=math.inf) for i in free}
        taken.append(max(free, key=lambda i: (reach[i], -i)))
    return taken[len(pivots or []):]


@given(n=SIZES, seed=SEEDS, data=st.data())
def test_farthest_point_equals_a_plain_loop(n, seed, data) -> None:
    distance = cosine_distance(states(n, seed))
    pivots = data.draw(st.none() | st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    count = data.draw(st.integers(0, n - len(pivots or [])))
    given_pivots = None if pivots is None else torch.tensor([[*pivots, -1]])
    order, reach = farthest_point(distance, torch.tensor([count]), everything(n), pivots=given_pivots)
    assert order[0].tolist() == farthest_twin(distance[0].numpy(), count, pivots)
    later = reach[0] if pivots else reach[0, 1:]
    assert bool((later.diff() <= 0).all())


@given(n=st.integers(2, 9), seed=SEEDS, data=st.data())
def test_farthest_point_reaches_half_of_the_best_chord_and_a_quarter_of_the_best_distance(n, seed, data) -> None:
    distance = cosine_distance(states(n, seed))
    count = data.draw(st.integers(2, n))
    order, _ = farthest_point(distance, torch.tensor([count]), everything(n))

    def spread(subset) -> float:
        return min(float(distance[0, i, j]) for i, j in itertools.combinations(subset, 2))

    best = max(spread(subset) for subset in itertools.combinations(range(n), count))
    assert spread(order[0].tolist()) >= best / 4 - 1e-6
    assert math.sqrt(2 * spread(order[0].tolist())) >= math.sqrt(2 * best) / 2 - 1e-3


def test_identical_tokens_are_taken_once_each_by_index() -> None:
    tokens = torch.tensor([[[0.3, 0.1, 0.7]]]).repeat(1, 5, 1)
    order, reach = farthest_point(cosine_distance(tokens), torch.tensor([5]), everything(5))
    assert order.tolist() == [[0, 1, 2, 3, 4]]
    assert reach.tolist() == [[0.0] * 5]


@given(seed=SEEDS, scale=st.floats(0.1, 50))
def test_cosine_distance_does_not_see_the_length_of_tokens(seed, scale) -> None:
    tokens = states(8, seed)
    lengths = torch.linspace(0.5, scale, 8)[None, :, None]
    torch.testing.assert_close(cosine_distance(tokens * lengths), cosine_distance(tokens), atol=2e-6, rtol=0)


def test_a_single_token_has_nobody_near() -> None:
    assert isolation(torch.zeros(1, 1, 1), everything(1)).tolist() == [[math.inf]]
    assert farthest_point(torch.zeros(1, 1, 1), torch.tensor([1]), everything(1))[0].tolist() == [[0]]


def dpp_twin(kernel: np.ndarray, count: int) -> list[int]:
    """Try every token at every step and take the largest determinant."""
    taken: list[int] = []
    for _ in range(count):
        free = [i for i in range(len(kernel)) if i not in taken]
        taken.append(max(free, key=lambda i: np.linalg.det(kernel[np.ix_([*taken, i], [*taken, i])])))
    return taken


@given(n=SIZES, seed=SEEDS, data=st.data())
def test_dpp_map_equals_greedy_determinants(n, seed, data) -> None:
    tokens = states(n, seed, channels=n + 2)
    weight = torch.rand(1, n, generator=torch.Generator().manual_seed(seed)) + 0.1
    kernel = weight[:, :, None] * cosine(tokens, tokens) * weight[:, None]
    count = data.draw(st.integers(1, n))
    order, gain = dpp_map(kernel, torch.tensor([count]), everything(n))
    assert order[0].tolist() == dpp_twin(kernel[0].double().numpy(), count)
    assert int(order[0, 0]) == int(weight[0].argmax())
    chosen = kernel[0].double()[order[0]][:, order[0]]
    assert math.isclose(float(gain[0].double().prod()), float(torch.linalg.det(chosen)), rel_tol=1e-2, abs_tol=1e-9)


def test_dpp_map_of_an_exhausted_kernel_goes_on_by_index_without_nan() -> None:
    tokens = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [1.0, 1.0]]])
    order, gain = dpp_map(cosine(tokens, tokens), torch.tensor([5]), everything(5))
    assert order.tolist() == [[0, 2, 1, 3, 4]]
    assert gain.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0]]
    order, gain = dpp_map(torch.zeros(1, 3, 3), torch.tensor([3]), everything(3))
    assert order.tolist() == [[0, 1, 2]]
    assert not gain.isnan().any()


def test_dpp_map_takes_one_of_each_orthogonal_group_first() -> None:
    group = torch.tensor([0, 1, 2, 0, 1, 2])
    tokens = torch.eye(3)[group][None]
    order, _ = dpp_map(cosine(tokens, tokens), torch.tensor([3]), everything(6))
    spread, _ = farthest_point(cosine_distance(tokens), torch.tensor([3]), everything(6))
    assert sorted(group[order[0]].tolist()) == sorted(group[spread[0]].tolist()) == [0, 1, 2]


@given(n=SIZES, seed=SEEDS, data=st.data())
def test_facility_location_takes_the_largest_recounted_gain_and_gains_fall(n, seed, data) -> None:
    similarity = cosine(states(n, seed), states(n, seed))
    count = data.draw(st.integers(1, n))
    for weight in (None, torch.rand(1, n, generator=torch.Generator().manual_seed(seed)) + 0.5):
        order, gains = facility_location(similarity, torch.tensor([count]), everything(n), weight=weight)
        check_gains(similarity[0].double().numpy(), order[0].tolist(), gains[0].tolist(), weight)
        assert weight is not None or bool((gains[0].diff() <= 1e-5).all())


def check_gains(similarity: np.ndarray, order: list[int], gains: list[float], weight: Tensor | None) -> None:
    """Count the coverage of every candidate set anew. (Two tokens may gain the same but for rounding.)"""
    def covered(subset: list[int]) -> float:
        return float(np.maximum(similarity[subset].max(axis=0), 0).sum()) if subset else 0.0

    for step, (pick, gain) in enumerate(zip(order, gains, strict=True)):
        taken = order[:step]
        recounted = {
            i: (covered([*taken, i]) - covered(taken)) * (1.0 if weight is None else float(weight[0, i]))
            for i in range(len(similarity)) if i not in taken
        }
        assert gain == pytest.approx(recounted[pick], abs=1e-5)
        assert recounted[pick] >= max(recounted.values()) - 1e-5


def test_facility_location_breaks_exact_ties_by_index() -> None:
    assert facility_location(torch.ones(1, 4, 4), torch.tensor([4]), everything(4))[0].tolist() == [[0, 1, 2, 3]]


@given(sizes=st.lists(SIZES, min_size=1, max_size=4), seed=SEEDS, data=st.data())
def test_samples_do_not_see_each_other(sizes, seed, data) -> None:
    counts = [data.draw(st.integers(0, n)) for n in sizes]
    tokens, valid = ragged(sizes, seed)
    likeness, far = cosine(tokens, tokens), cosine_distance(tokens)
    for select, matrix in ((farthest_point, far), (dpp_map, likeness), (facility_location, likeness)):
        together, _ = select(matrix, torch.tensor(counts), valid)
        for i, (n, count) in enumerate(zip(sizes, counts, strict=True)):
            alone, _ = select(matrix[i : i + 1, :n, :n], torch.tensor([count]), everything(n))
            assert together[i, :count].tolist() == alone[0].tolist()
            assert together[i, count:].tolist() == [-1] * (together.shape[1] - count)


@pytest.mark.parametrize("select", [farthest_point, dpp_map, facility_location])
def test_more_than_there_is_is_refused(select) -> None:
    with pytest.raises(DartLabError, match=r"asked for \[3\] tokens of rows that offer \[2\]"):
        select(torch.eye(2)[None], torch.tensor([3]), everything(2))
