"""Random, uniform grid, none-kept and keep-all."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import KeepAll, NoneKept, Random, Signals, UniformGrid
from dart_lab.pruners.uniform_grid import lattice, proportional, spread


def grid_signals(*shapes: tuple[int, int], newlines: bool = False) -> Signals:
    cells = []
    for image, (rows, columns) in enumerate(shapes):
        for row in range(rows):
            cells += [(image, 0, row, column) for column in range(columns)]
            cells += [(image, 0, -1, -1)] if newlines else []
    return Signals.of(visual=torch.arange(len(cells))[None], grid=torch.tensor([cells]))


# ---- Random


def test_every_subset_is_equally_likely() -> None:
    signals = Signals.of(visual=torch.arange(5)[None])
    subsets = dict.fromkeys(combinations(range(5), 2), 0)
    draws = 2000
    for seed in range(draws):
        subsets[tuple(Random(keep=2, seed=seed)(signals).keep[0].tolist())] += 1
    expected = draws / 10
    chi_squared = sum((count - expected) ** 2 / expected for count in subsets.values())
    assert chi_squared < 27.9  # 0.1 % point with 9 degrees of freedom


def test_a_draw_belongs_to_the_sample_not_to_the_batch() -> None:
    seeds, visual = (11, 22, 33), torch.arange(40).expand(3, -1)
    together = Random(keep=9)(Signals.of(visual=visual, sample_seeds=seeds)).keep
    backwards = Random(keep=9)(Signals.of(visual=visual, sample_seeds=seeds[::-1])).keep
    assert torch.equal(together, backwards.flip(0))
    assert not torch.equal(together[0], together[1])
    for row, seed in enumerate(seeds):
        alone = Random(keep=9)(Signals.of(visual=visual[:1], sample_seeds=(seed,))).keep
        assert torch.equal(together[row], alone[0])


def test_another_seed_is_another_draw() -> None:
    signals = Signals.of(visual=torch.arange(200)[None])
    kept = [set(Random(keep=50, seed=seed)(signals).keep[0].tolist()) for seed in range(20)]
    overlaps = [len(a & b) for a, b in combinations(kept, 2)]
    assert 11 < sum(overlaps) / len(overlaps) < 14  # hypergeometric mean 12.5


# ---- uniform grid


@pytest.mark.parametrize(("keep", "cell"), [(144, 2), (64, 3), (36, 4), (16, 6), (9, 8), (4, 12), (1, 24), (576, 1)])
def test_one_token_a_cell_of_24_by_24(keep, cell) -> None:
    got = UniformGrid(keep=keep)(grid_signals((24, 24))).keep[0].tolist()
    cells = {(i // 24 // cell, i % 24 // cell) for i in got}
    assert len(cells) == len(got) == keep


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), data=st.data())
def test_lattice_is_exact_and_even(rows, columns, data) -> None:
    m = data.draw(st.integers(0, rows * columns))
    places = lattice(rows, columns, m)
    assert len(set(places)) == len(places) == m
    assert all(0 <= row < rows and 0 <= column < columns for row, column in places)
    a_row = [sum(row == r for row, _ in places) for r in {row for row, _ in places}]
    assert not a_row or max(a_row) - min(a_row) <= 1


@given(n=st.integers(1, 60), data=st.data())
def test_spread_is_even(n, data) -> None:
    """Each place holds the centre of one of m equal pieces; the gaps differ by at most one."""
    m = data.draw(st.integers(1, n))
    places = spread(n, m)
    assert all(place <= (i + 0.5) * n / m < place + 1 for i, place in enumerate(places))
    assert {b - a for a, b in pairwise(places)} <= {n // m, -(-n // m)}


@given(sizes=st.lists(st.integers(1, 600), min_size=1, max_size=6), data=st.data())
def test_shares_are_within_one_of_the_proportion(sizes, data) -> None:
    total = data.draw(st.integers(0, sum(sizes)))
    shares = proportional(total, sizes)
    assert sum(shares) == total
    for share, size in zip(shares, sizes, strict=True):
        assert abs(share - total * size / sum(sizes)) < 1
        assert share <= size


def test_images_share_in_proportion() -> None:
    got = UniformGrid(keep=30)(grid_signals((4, 6), (6, 6))).keep[0]
    assert (int((got < 24).sum()), int((got >= 24).sum())) == (12, 18)


def test_newlines_come_last() -> None:
    signals = grid_signals((4, 5), newlines=True)  # 24 tokens, four of them newlines
    newline = set(range(5, 24, 6))
    assert not newline & set(UniformGrid(keep=20)(signals).keep[0].tolist())
    assert len(newline & set(UniformGrid(keep=22)(signals).keep[0].tolist())) == 2


@given(keep=st.integers(1, 23), newlines=st.booleans())
def test_the_budget_is_exact_on_any_grid(keep, newlines) -> None:
    signals = grid_signals((3, 4), (1, 4), (7, 1), newlines=newlines)
    assert UniformGrid(keep=keep)(signals).counts.tolist() == [keep]


def test_without_a_grid_tokens_are_a_line() -> None:
    assert UniformGrid(keep=3)(Signals.of(visual=torch.arange(9)[None])).keep[0].tolist() == [1, 4, 7]


def test_a_grid_with_holes_is_a_line() -> None:
    cells = torch.tensor([[(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1)]])
    got = UniformGrid(keep=2)(Signals.of(visual=torch.arange(3)[None], grid=cells))
    assert got.counts.tolist() == [2]


# ---- none and all


def test_none_and_all() -> None:
    signals = Signals.of(visual=torch.tensor([[0, 1, 2], [0, 1, -1]]))
    assert NoneKept()(signals).keep.shape == (2, 0)
    assert KeepAll()(signals).keep.tolist() == [[0, 1, 2], [0, 1, -1]]


@pytest.mark.parametrize("method", [NoneKept, KeepAll])
def test_they_take_no_keep(method) -> None:
    with pytest.raises(DartLabError, match="leave keep out"):
        method(keep=3)
