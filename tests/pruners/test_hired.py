"""HiRED: how a budget is shared over crops, in both modes, with planted attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import HiRED
from dart_lab.pruners.hired import patches_in
from dart_lab.testing import check_pruner
from tests.pruners.crops import crops

WHOLE = (0.0, 0.0, 1.0, 1.0)
QUADRANTS = [(x, y, x + 0.5, y + 0.5) for y in (0.0, 0.5) for x in (0.0, 0.5)]


def picture(seed: int = 0, *, regions=(WHOLE, *QUADRANTS), side=4, early: torch.Tensor | None = None, image=None):
    """One picture seen whole and in parts; `early` `(side, side)`: the whole view's early class-token attention."""
    signals = crops(len(regions), side, side, seed=seed)
    if early is not None:
        n = side * side + 1
        maps = torch.cat([torch.zeros(1), early.flatten()]).expand(len(regions), 1, n, n)
        signals = replace(signals, providers={**signals.providers, "attention@0": lambda queries: maps[:, :, :1]})
    image = torch.zeros(len(regions), dtype=torch.int64) if image is None else image
    return replace(signals, image=image, region=torch.tensor(regions))


@pytest.mark.parametrize("method", [HiRED(keep=4), HiRED(keep=0.4, budget="official")])
def test_contract(method) -> None:
    check_pruner(method)


def test_a_blob_of_early_attention_draws_the_budget_to_its_quadrant() -> None:
    for quadrant, (down, across) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        early = torch.zeros(4, 4)
        early[down : down + 2, across : across + 2] = 1.0
        got = HiRED(keep=0.2)(picture(early=early))  # 16 of 80: 8 for the whole view, 8 for the parts
        want = [0, 0, 0, 0]
        want[quadrant] = 8
        assert got.counts.tolist() == [8, *want]


def test_official_strips_mistake_the_right_half_for_the_bottom() -> None:
    early = torch.zeros(4, 4)
    early[:2, 2:] = 1.0  # the upper right quadrant; marked patches 2, 3, 6, 7 lie in the first two strips of 4
    exact = HiRED(keep=0.2, alpha=0.75)(picture(early=early)).counts.tolist()
    official = HiRED(keep=0.2, alpha=0.75, budget="official")(picture(early=early)).counts.tolist()
    assert exact == [12, 0, 4, 0, 0]
    assert official == [12, 2, 2, 0, 0]


@given(seed=st.integers(0, 2**31), keep=st.floats(0.05, 1.0), alpha=st.floats(0, 1))
def test_exact_spends_all_and_official_never_more(seed, keep, alpha) -> None:
    signals = picture(seed)
    exact, official = HiRED(keep=keep, alpha=alpha)(signals), HiRED(keep=keep, alpha=alpha, budget="official")(signals)
    assert int(exact.counts.sum()) == max(1, int(80 * keep + 0.5))
    assert bool((exact.counts <= 16).all())
    assert int(official.counts.sum()) <= int(80 * keep)


def test_a_number_counts_for_each_crop_on_average() -> None:
    assert int(HiRED(keep=5)(picture()).counts.sum()) == 25
    assert HiRED(keep=16)(picture()).counts.tolist() == [16] * 5


def test_pictures_in_a_batch_do_not_share() -> None:
    one, other = picture(1), picture(2, regions=(WHOLE, QUADRANTS[0], QUADRANTS[3]))
    regions = (WHOLE, *QUADRANTS, WHOLE, QUADRANTS[0], QUADRANTS[3])
    both = picture(3, regions=regions, image=torch.tensor([4] * 5 + [7] * 3))
    names = ("attention", "attention@0")
    query = torch.zeros(5, 1, dtype=torch.int64)
    maps = {name: torch.cat([one.attention(query, of=name), other.attention(query[:3], of=name)]) for name in names}
    both = replace(both, providers={
        **both.providers, **{name: (lambda queries, rows=rows: rows) for name, rows in maps.items()},
    })
    got = HiRED(keep=0.3)(both)
    for alone, rows in ((HiRED(keep=0.3)(one), slice(0, 5)), (HiRED(keep=0.3)(other), slice(5, 8))):
        assert torch.equal(got.mask()[rows], alone.mask())


def test_every_patch_of_the_whole_view_lies_in_one_quadrant() -> None:
    signals = picture(side=3)
    base = torch.tensor(0)
    inside = torch.stack([patches_in(signals, base, torch.tensor(tile)) for tile in range(1, 5)])
    assert inside.sum(dim=0).tolist() == [1] * 9
    assert inside[0].reshape(3, 3).tolist() == [[True, False, False], [False, False, False], [False, False, False]]


def test_hired_names_what_is_missing() -> None:
    with pytest.raises(DartLabError, match="places"):
        HiRED(keep=4)(replace(picture(), region=None))
    with pytest.raises(DartLabError, match="whole picture"):
        HiRED(keep=4)(picture(regions=QUADRANTS))
    blind = replace(picture(), cls=None)
    with pytest.raises(DartLabError, match="no class token"):
        HiRED(keep=4)(blind)
    for wrong in ({"alpha": 1.2}, {"early": -1}):
        with pytest.raises(DartLabError, match=next(iter(wrong))):
            HiRED(keep=4, **wrong)
