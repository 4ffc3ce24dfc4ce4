"""Cutting a sequence twice is cutting it once by both decisions together: states, rows and positions, text between."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dart_lab.pruners.reduction import PAD, Reduction, compose, mask_to_rows
from dart_lab.vlm.cuts import Cut, make_cut, select_positions
from tests.pruners.test_compose import HOW, drawn


def cut_by(reduction: Reduction, rows: Tensor, visual: Tensor) -> Cut:
    return make_cut(reduction, layer=1, rows=rows, visual=visual, positions=mask_to_rows(visual), compact=False)


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any), seed=st.integers(0, 2**20),
    hows=st.tuples(st.sampled_from(HOW), st.sampled_from(HOW)), reorder=st.booleans(),
)
def test_two_cuts_are_one(sizes: list[int], seed: int, hows: tuple[str, str], reorder: bool) -> None:
    """Slots are right-aligned and the padding of shorter rows is empty; text stays where it is."""
    generator, length, batch = torch.Generator().manual_seed(seed), max(sizes) + 5, len(sizes)
    scattered = torch.rand(batch, length, generator=generator).argsort(dim=1).argsort(dim=1)
    visual = scattered < torch.tensor(sizes)[:, None]
    rows = torch.arange(length).expand(batch, -1)
    x = torch.randn(batch, length, 3, generator=generator)
    size = torch.tensor(sizes)
    first = drawn(seed, size, hows[0], before=torch.ones(batch, max(sizes)))
    second = drawn(seed + 1, first.counts, hows[1], reorder=reorder, before=first.slot_sizes())

    one = cut_by(first, rows, visual)
    still = visual.gather(1, one.rows.clamp(min=0)) & (one.rows != PAD)
    two = cut_by(second, one.rows, still)
    both = cut_by(compose(second, first), rows, visual)

    assert torch.equal(two.rows, both.rows), "which token of the prompt each slot stands for"
    real = (both.rows != PAD)[:, :, None]
    torch.testing.assert_close(two.states(one.states(x)) * real, both.states(x) * real, atol=1e-5, rtol=1e-5)
    ids = 10 * rows + torch.arange(batch)[:, None]  # position ids that tell the rows of the batch apart
    twice = select_positions(select_positions(ids, one.local), two.local)
    assert torch.equal(twice[real[:, :, 0]], select_positions(ids, both.local)[real[:, :, 0]])
    for row in range(batch):  # text stays, in its order
        text = [int(i) for i in both.rows[row] if i != PAD and not visual[row, int(i)]]
        assert text == (~visual[row]).nonzero()[:, 0].tolist()
    back = both.scatter(both.states(x), length)
    assert torch.equal(back[~visual], x[~visual]) and not back[mask_dropped(both.rows, length)].any()


def mask_dropped(rows: Tensor, length: int) -> Tensor:
    """`(batch, length)` bool: tokens that no slot stands for."""
    there = torch.zeros(len(rows), length + 1, dtype=torch.bool)
    there.scatter_(1, rows.where(rows != PAD, length), True)
    return ~there[:, :length]
