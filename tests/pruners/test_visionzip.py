"""VisionZip and PruMerge: who stays, who merges into whom, with what weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import PruMerge, VisionZip
from dart_lab.pruners.prumerge import evenly
from dart_lab.testing import check_pruner
from tests.pruners.crops import class_row, crops
from tests.twins import cosine_twin, top_k_twin


@pytest.mark.parametrize("method", [
    VisionZip(keep=4), VisionZip(keep=4, merging="sum"), PruMerge(keep=4), PruMerge(), PruMerge(strided=True),
    PruMerge(keep=4, strided=True, extra=False, budget="official"),
], ids=lambda method: method.name)
def test_contract(method) -> None:
    check_pruner(method)


def zip_twin(signals, keep: int, contextual: int, merging: str) -> torch.Tensor:
    """Output tokens of one crop, class token first, by lists."""
    tokens = signals.visual[0].tolist()
    states, keys = signals.get("hidden")[0].double(), signals.get("keys")[0].double().mean(dim=0)
    row = signals.attention(torch.zeros(1, 1, dtype=torch.int64))[0, :, 0].mean(dim=0)
    patches = [t for t in tokens if t != 0]
    dominant = sorted([0, *[patches[i] for i in top_k_twin([float(row[t]) for t in patches], keep - contextual - 1)]])
    rest = [t for t in tokens if t not in dominant]
    out = [states[t] for t in dominant]
    step = max(1, len(rest) // contextual) if contextual else 1
    targets = rest[::step][:contextual]
    homes: dict[int, list[int]] = {t: [] for t in targets}
    if targets:
        for t in rest:
            if t not in targets:
                homes[max(targets, key=lambda c: cosine_twin(keys[c], keys[t]))].append(t)
    for target, members in homes.items():
        if merging == "mean":
            out.append(torch.stack([states[t] for t in [target, *members]]).mean(dim=0))
        else:
            out.append(states[target] + (torch.stack([states[t] for t in members]).mean(dim=0) if members else 0))
    return torch.stack(out)


@given(n=st.integers(1, 11), seed=st.integers(0, 2**31), merging=st.sampled_from(["mean", "sum"]), data=st.data())
def test_visionzip_equals_a_plain_loop(n, seed, merging, data) -> None:
    keep = data.draw(st.integers(1, n + 1))
    contextual = data.draw(st.integers(0, keep - 1))
    signals = crops(1, 1, n, seed=seed, keeps_cls=True)
    got = VisionZip(keep=keep, contextual=contextual, merging=merging)(signals)
    want = zip_twin(signals, keep, contextual, merging)
    torch.testing.assert_close(got.apply(signals.get("hidden"))[0].double(), want, atol=1e-5, rtol=1e-5)
    assert got.sequence[0, 0] == 0  # the class token is the first of the output


@given(n=st.integers(4, 20), keep=st.integers(2, 20), seed=st.integers(0, 2**31))
def test_every_patch_that_is_not_dominant_is_assigned_once(n, keep, seed) -> None:
    keep = min(keep, n)
    got = VisionZip(keep=keep, contextual=1)(crops(2, 1, n, seed=seed, keeps_cls=True))
    members = got.members()
    assert bool((members.sum(dim=1) == 1).all())
    assert got.slot_sizes().sum(dim=1).tolist() == [n + 1] * 2
    torch.testing.assert_close(got.weights().sum(dim=2), torch.ones(2, keep))


@pytest.mark.parametrize(("keep", "contextual"), [(192, 30), (128, 20), (64, 10), (32, 5)])
def test_the_published_split(keep, contextual) -> None:
    assert VisionZip(keep=keep)._contextual(torch.tensor([keep])).tolist() == [contextual]


def test_crops_of_different_size_and_a_tower_without_class_token() -> None:
    got = VisionZip(keep=4, contextual=2)(crops(2, 2, 4, class_token=False))
    assert got.counts.tolist() == [4, 4] and got.notes["class_token"].tolist() == [False, False]


def test_visionzip_names_what_is_wrong() -> None:
    signals = crops(1, 2, 3, keeps_cls=True)
    with pytest.raises(DartLabError, match="leaves no dominant one"):
        VisionZip(keep=4, contextual=4)(signals)
    for wrong in (-1, 1.0, True, "10"):
        with pytest.raises(DartLabError, match="contextual"):
            VisionZip(keep=4, contextual=wrong)
    with pytest.raises(DartLabError, match="'mean'"):
        VisionZip(keep=4, merging="meen")


def test_prumerge_keeps_what_stands_out() -> None:
    row = class_row(0.1, 0.11, 0.9, 0.1, 0.12, 0.1, 0.1, 0.8)
    signals = crops(1, 2, 4, heads=1, attention=row)
    got = PruMerge(extra=False)(signals)
    assert got.keep.tolist() == [[2, 7]] and got.asked.tolist() == [-1]
    assert PruMerge(extra=False, budget="official")(signals).sequence.tolist() == [[2, 7]]
    alike = crops(1, 2, 4, heads=1, attention=class_row(*[0.1] * 8))
    assert PruMerge(extra=False)(alike).keep.tolist() == [[0]]  # nothing stands out: the first of equals


@given(n=st.integers(2, 12), seed=st.integers(0, 2**31), neighbours=st.integers(0, 5), data=st.data())
def test_prumerge_weights_equal_a_plain_loop(n, seed, neighbours, data) -> None:
    keep = data.draw(st.integers(1, n))
    signals = crops(1, 1, n, seed=seed)
    row = signals.attention(torch.zeros(1, 1, dtype=torch.int64))[0, :, 0, 1:].mean(dim=0).tolist()
    keys = signals.get("keys")[0, :, 1:].transpose(0, 1).flatten(1)
    gathers = 2 <= keep < n
    centres = top_k_twin(row, keep - gathers)
    for merging in ("mean", "sum"):
        got = PruMerge(keep=keep, neighbours=neighbours, merging=merging)(signals)
        weights = got.weights()[0]
        for slot, centre in enumerate(sorted(centres)):
            others = [i for i in range(n) if i != centre]
            like = [cosine_twin(keys[centre], keys[i]) for i in others]
            near = [others[i] for i in top_k_twin(like, min(neighbours, len(others)))]
            want = torch.zeros(n)
            want[near] = torch.tensor([row[i] for i in near])
            want[centre] = row[centre] if merging == "mean" else 1.0
            want = want / want.sum() if merging == "mean" else want
            torch.testing.assert_close(weights[slot], want, atol=1e-6, rtol=1e-4)
        if gathers:
            rest = [i for i in range(n) if i not in centres]
            assert set(weights[-1].nonzero()[:, 0].tolist()) == set(rest)
            assert int(got.sequence[0, -1]) == max(rest, key=lambda i: (row[i], -i))


def test_prumerge_plus_adds_evenly_spaced_patches() -> None:
    row = class_row(*[0.1 + 0.001 * (i % 3) for i in range(20)], 0.9, 0.8, *[0.1] * 2)
    signals = crops(1, 4, 6, heads=1, attention=row)
    got = PruMerge(strided=True, extra=False)(signals)  # two outliers of 24: every fourth patch
    assert got.keep.tolist() == [[0, 4, 8, 12, 16, 20, 21]]
    fixed = PruMerge(keep=8, strided=True, extra=False)(signals)
    assert {20, 21} <= set(fixed.keep[0].tolist()) and fixed.counts.tolist() == [8]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_evenly_takes_exactly_as_many_as_asked(marked, data) -> None:
    count = data.draw(st.integers(0, sum(marked)))
    got = evenly(torch.tensor([marked]), torch.tensor([count]))[0]
    assert int(got.sum()) == count and not (got & ~torch.tensor(marked)).any()
