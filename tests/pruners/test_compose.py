"""Two reductions one after the other are one reduction: states, sizes, places and the patches behind every token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.assignment import merge_assigned
from dart_lab.pruners.reduction import PAD, Merge, Reduction, compose, mask_to_rows

HOW = ("drop", "mean", "weighted", "sum", "add", "extra")
PARTS = ("mean", "weighted", "sum")  # every token goes into exactly one slot, unless it is dropped
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)  # a prompt without pictures beside others


def drawn(
    seed: int, size: Tensor, how: str, *, reorder: bool = False, spare: int = 0, lose: bool = True,
    before: Tensor | None = None,
) -> Reduction:
    """A reduction of `size` `(batch,)` tokens by chance.

    "drop" merges nothing; "mean", "weighted" (by `before` `(batch, n)`, patches each token stands for) and "sum" send
    every token to one slot, or to none where `lose`; "add" leaves the kept ones whole and adds shares of the others;
    "extra" has slots that hold others only, not the token that represents them. `reorder` shuffles the slots, `spare`
    adds empty ones.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, n = len(size), int(size.max())

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    valid = torch.arange(n) < size[:, None]
    stays = valid & ((chance(batch, n) < 0.6) | (torch.arange(n) == 0))  # the first one at least
    keep = torch.cat([mask_to_rows(stays), torch.full((batch, spare), PAD)], dim=1)
    slots = keep
    if reorder:
        shuffle = chance(*keep.shape).masked_fill(keep == PAD, 2.0).argsort(dim=1)
        slots = keep.gather(1, shuffle)
    made = Reduction(keep=keep, size=size, asked=(keep != PAD).sum(dim=1), slots=slots if reorder else None)
    if how == "drop":
        return made
    own = made.weights()  # (batch, m, n)
    count = made.counts[:, None].clamp(min=1)
    home = (chance(batch, n) * count).long()
    home = torch.where(stays, own.argmax(dim=1), home)
    goes = valid & (stays | (chance(batch, n) < (0.7 if lose else 2.0)))
    sizes = None
    if how in PARTS:
        weight = before if how == "weighted" else None
        home = home.masked_fill(~goes, PAD)
        merge, sizes = merge_assigned(home, keep.shape[1], sizes=weight, mode="sum" if how == "sum" else "mean")
        if how != "weighted":
            sizes = None  # to be counted
    else:
        shares = torch.nn.functional.one_hot(home, keep.shape[1]).mT * (chance(batch, 1, n) + 0.1)
        others = shares * (goes & ~stays)[:, None]
        if how == "extra":
            hollow = others.any(dim=2, keepdim=True) & (chance(batch, keep.shape[1], 1) < 0.5)
            own = own.masked_fill(hollow, 0.0)
        merge = Merge.from_dense(own + others)
    return Reduction(keep=keep, size=size, asked=made.asked, slots=made.slots, merge=merge, sizes=sizes)


def states(size: Tensor, seed: int) -> Tensor:
    """`(batch, n, 3)`; what lies beyond a row's size is large, and must not matter."""
    n = int(size.max())
    x = torch.randn(len(size), n, 3, generator=torch.Generator().manual_seed(seed))
    return torch.where((torch.arange(n) < size[:, None])[:, :, None], x, 1e6)


@given(
    sizes=SIZES, seed=st.integers(0, 2**20), first_how=st.sampled_from(HOW), second_how=st.sampled_from(HOW),
    reorder=st.tuples(st.booleans(), st.booleans()), spare=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_applying_both_is_applying_one_after_the_other(
    sizes: list[int], seed: int, first_how: str, second_how: str, reorder: tuple[bool, bool], spare: tuple[int, int]
) -> None:
    size = torch.tensor(sizes)
    first = drawn(seed, size, first_how, reorder=reorder[0], spare=spare[0], before=torch.ones(len(size), max(sizes)))
    patches = first.slot_sizes()[:, : int(first.counts.max())]
    second = drawn(seed + 1, first.counts, second_how, reorder=reorder[1], spare=spare[1], before=patches)
    both = compose(second, first)
    both.check(size=size, method="both")

    x = states(size, seed)
    middle = first.apply(x)[:, : int(first.counts.max())]
    torch.testing.assert_close(both.apply(x), second.apply(middle), atol=1e-5, rtol=1e-5)
    assert not both.apply(x)[both.sequence == PAD].any(), "an empty slot holds something"
    assert torch.equal(both.counts, second.counts)
    torch.testing.assert_close(both.slot_sizes(), second.slot_sizes(patches))

    inside, outside = second.members(), first.members()
    for row in range(len(size)):
        for slot, token in enumerate(second.sequence[row].tolist()):
            place = PAD if token == PAD else int(first.sequence[row, token])  # original positions go along
            assert int(both.sequence[row, slot]) == place
            patches_of = {
                int(patch) for i in inside[row, slot].nonzero()[:, 0] for patch in outside[row, int(i)].nonzero()[:, 0]
            }
            assert patches_of == set(both.members()[row, slot].nonzero()[:, 0].tolist())


@given(sizes=SIZES, seed=st.integers(0, 2**20), hows=st.tuples(*[st.sampled_from(("drop", *PARTS))] * 3))
def test_every_patch_ends_in_at_most_one_token_and_in_one_if_none_is_dropped(
    sizes: list[int], seed: int, hows: tuple[str, ...]
) -> None:
    size = torch.tensor(sizes)
    patches, whole = torch.ones(len(size), max(sizes)), None
    for step, how in enumerate(hows):
        counts = size if whole is None else whole.counts
        stage = drawn(seed + step, counts, how, lose=False, before=patches)
        whole = stage if whole is None else compose(stage, whole)
        patches = whole.slot_sizes()
    assert whole is not None
    homes = whole.members().sum(dim=1)  # (batch, n)
    valid = torch.arange(max(sizes)) < size[:, None]
    assert homes.max(dim=1).values.tolist() == [int(n > 0) for n in sizes]
    assert torch.equal(patches.sum(dim=1), homes.sum(dim=1).float()), "sizes are the patches that went in"
    if "drop" not in hows:
        assert torch.equal(homes, valid.long())


@given(sizes=SIZES, seed=st.integers(0, 2**20), hows=st.tuples(*[st.sampled_from(HOW)] * 3))
def test_it_makes_no_difference_which_two_are_joined_first(sizes: list[int], seed: int, hows: tuple[str, ...]) -> None:
    size = torch.tensor(sizes)
    a = drawn(seed, size, hows[0], reorder=True, before=torch.ones(len(size), max(sizes)))
    b = drawn(seed + 1, a.counts, hows[1], reorder=True, before=a.slot_sizes())
    c = drawn(seed + 2, b.counts, hows[2], before=b.slot_sizes(a.slot_sizes()))
    left, right = compose(c, compose(b, a)), compose(compose(c, b), a)
    assert torch.equal(left.sequence, right.sequence) and torch.equal(left.keep, right.keep)
    x = states(size, seed)
    torch.testing.assert_close(left.apply(x), right.apply(x), atol=1e-5, rtol=1e-5)


@given(sizes=SIZES, seed=st.integers(0, 2**20), how=st.sampled_from(HOW))
def test_keeping_all_before_or_after_changes_nothing(sizes: list[int], seed: int, how: str) -> None:
    size = torch.tensor(sizes)
    some = drawn(seed, size, how, reorder=True, before=torch.ones(len(size), max(sizes)))
    before = Reduction.from_mask(torch.arange(max(sizes)) < size[:, None], size)
    after = Reduction.from_mask(torch.arange(int(some.counts.max())) < some.counts[:, None], some.counts)
    x = states(size, seed)
    for both in (compose(some, before), compose(after, some)):
        assert torch.equal(both.sequence, some.sequence)
        torch.testing.assert_close(both.apply(x), some.apply(x))
        torch.testing.assert_close(both.slot_sizes(), some.slot_sizes())


def test_sizes_that_the_first_knows_go_along_though_neither_merges() -> None:
    size = torch.tensor([3])
    first = Reduction(keep=torch.tensor([[0, 2]]), size=size, asked=size, sizes=torch.tensor([[4.0, 9.0]]))
    second = Reduction(keep=torch.tensor([[1]]), size=torch.tensor([2]), asked=torch.tensor([1]))
    assert compose(second, first).slot_sizes().tolist() == [[9.0]]


def test_what_does_not_fit_is_refused() -> None:
    first = drawn(0, torch.tensor([5]), "drop")
    with pytest.raises(DartLabError, match="cannot compose"):
        compose(drawn(0, torch.tensor([5]), "drop"), compose(drawn(1, first.counts, "drop"), first))
