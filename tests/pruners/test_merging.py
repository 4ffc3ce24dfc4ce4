"""Matching, clustering and bucketing against plain loops; merging keeps what it must."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dart_lab.pruners.assignment import in_order, merge_assigned, unmerge
from dart_lab.pruners.clustering import dpc_knn, pairwise
from dart_lab.pruners.elastic_cache import ElasticCache, buckets
from dart_lab.pruners.grid_windows import window_similarity, windows
from dart_lab.pruners.matching import bipartite_match, match_in_groups, merge_matched
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.tome import ToMe, ToMeBlock, ToMeLLM
from tests.twins import cosine_twin

QUICK = settings(max_examples=25, deadline=None)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_of(*sizes: int) -> Tensor:
    return torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]


@QUICK
@given(st.integers(0, 99), st.integers(1, 12), st.integers(0, 7), st.booleans())
def test_bipartite_matching_is_the_loop(seed: int, n: int, r: int, protect: bool) -> None:
    x = draw(seed, 1, n, 5)
    first = torch.arange(n)[None] == 0 if protect else None
    match = bipartite_match(x, torch.tensor([r]), rows_of(n), first)
    pairs = []
    for a in range(0, n, 2):
        scores = [(cosine_twin(x[0, a], x[0, b]), b) for b in range(1, n, 2)]
        if scores and not (protect and a == 0):
            best = max(s for s, _ in scores)
            pairs.append((best, a, min(b for s, b in scores if s == best)))
    merges = sorted(pairs, key=lambda p: (-p[0], p[1]))[: min(r, (n - protect) // 2)]
    assert match.source[0].tolist() == [a for _, a, _ in merges]
    assert match.target[0].tolist() == [b for _, _, b in merges]
    reduction = merge_matched(match, torch.tensor([n]))
    assert float(reduction.sizes.sum()) == n
    assert torch.equal(reduction.members().sum(dim=1), torch.ones(1, n, dtype=torch.int64))  # each in one slot
    assert unmerge(reduction.apply(x), reduction).shape == x.shape
    total = (reduction.sizes[..., None] * reduction.apply(x)).sum(dim=1)
    torch.testing.assert_close(total, x.sum(dim=1), atol=1e-4, rtol=1e-4)
    if not merges:
        assert torch.equal(reduction.apply(x), x)
    if protect:
        assert int(reduction.sequence[0, 0]) == 0


def test_a_row_is_matched_in_a_batch_as_alone() -> None:
    x, sizes = draw(3, 3, 11, 6), (11, 4, 7)
    valid = rows_of(*sizes)
    together = bipartite_match(x, torch.tensor([3, 9, 0]), valid)
    for row, (n, r) in enumerate(zip(sizes, (3, 9, 0), strict=True)):
        alone = bipartite_match(x[row : row + 1, :n], torch.tensor([r]), rows_of(n))
        for name in ("source", "target", "unmerged"):
            found = getattr(together, name)[row]
            assert found[found != PAD].tolist() == getattr(alone, name)[0].tolist()


def test_groups_lose_no_token_and_drop_the_tail_only_when_asked() -> None:
    x = draw(1, 2, 11, 4)
    for tail, gone in (("merge", 0), ("drop", 3)):
        reduction = match_in_groups(x, 4, rows_of(11, 11), tail=tail)
        assert reduction.keep.tolist() == [[3, 7], [3, 7]]
        assert reduction.members().any(dim=1).sum(dim=1).tolist() == [11 - gone] * 2
    assert match_in_groups(x[:, :3], 4, rows_of(3, 3)).keep.tolist() == [[2], [2]]
    assert match_in_groups(x[:, :3], 4, rows_of(3, 3), tail="drop").counts.tolist() == [0, 0]


def density_peaks(x: Tensor, clusters: int) -> tuple[list[int], list[int]]:
    """Centres and members, point by point."""
    m = len(x)
    distance = [[float((x[i] - x[j]).norm() / x.shape[1] ** 0.5) for j in range(m)] for i in range(m)]
    density = torch.tensor([
        -sum(d * d for d in sorted(distance[i])[:clusters]) / clusters for i in range(m)
    ]).exp().tolist()
    largest = max(max(row) for row in distance)
    score = []
    for i in range(m):
        above = [distance[i][j] for j in range(m) if (density[j], -j) > (density[i], -i)]
        score.append(density[i] * min(above, default=largest))
    centres = sorted(range(m), key=lambda i: (-score[i], i))[:clusters]
    members = [
        centres.index(i) if i in centres else min(range(clusters), key=lambda c: distance[i][centres[c]])
        for i in range(m)
    ]
    return centres, members


@QUICK
@given(st.integers(0, 99), st.integers(4, 12), st.integers(3, 4))
def test_density_peaks_are_the_loop(seed: int, m: int, clusters: int) -> None:
    x = draw(seed, 1, m, 6)
    found = dpc_knn(x, torch.tensor([clusters]), rows_of(m))
    centres, members = density_peaks(x[0].double(), clusters)
    assert found.centre[0].tolist() == centres and found.member[0].tolist() == members


def test_equal_points_give_one_centre_a_place_and_no_chance() -> None:
    x = torch.tensor([0.0, 0.0, 0.0, 5.0, 5.0, 5.0])[None, :, None]
    found = dpc_knn(x, torch.tensor([2]), rows_of(6))
    assert found.centre.tolist() == [[0, 3]] and found.member.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert dpc_knn(x, torch.tensor([1]), rows_of(6)).member.tolist() == [[0] * 6]


def test_clusters_of_a_shorter_row_are_those_it_has_alone() -> None:
    x = draw(8, 2, 9, 3)
    together = dpc_knn(x, torch.tensor([3, 2]), rows_of(9, 5))
    alone = dpc_knn(x[1:, :5], torch.tensor([2]), rows_of(5))
    assert together.centre[1].tolist() == [*alone.centre[0].tolist(), PAD]
    assert together.member[1].tolist() == alone.member[0].tolist() + [PAD] * 4
    torch.testing.assert_close(pairwise(x, x, "cosine").diagonal(dim1=1, dim2=2), torch.zeros(2, 9), atol=1e-6, rtol=0)


def test_slots_can_be_sorted_without_changing_what_they_hold() -> None:
    x = draw(2, 1, 8, 3)
    first = merge_matched(bipartite_match(x, torch.tensor([3]), rows_of(8)), torch.tensor([8]))
    second = in_order(first, torch.arange(8)[None])
    assert second.sequence.tolist() == second.keep.tolist() != first.sequence.tolist()
    order = first.sequence[0].argsort()
    torch.testing.assert_close(second.apply(x), first.apply(x)[:, order])
    assert torch.equal(second.sizes, first.sizes[:, order])


def test_sums_and_weighted_means() -> None:
    x, slot = torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[0, 0, PAD]])
    total, sizes = merge_assigned(slot, 1, sizes=torch.tensor([[1.0, 3.0, 1.0]]), mode="sum")
    mean, _ = merge_assigned(slot, 1, sizes=torch.tensor([[1.0, 3.0, 1.0]]))
    assert total.apply(x, 1).item() == 4.0 and mean.apply(x, 1).item() == 2.5 and sizes.tolist() == [[4.0]]


def test_tome_reaches_its_budget_block_by_block() -> None:
    """Sizes add up to the patches, the class token stays first and alone, and the last block is in raster order."""
    n, width = 36, 6
    place = torch.arange(n)
    grid = torch.stack([0 * place, 0 * place, place // width, place % width], dim=1)
    grid = torch.cat([torch.full((1, 4), PAD), grid])[None]
    keys, sizes, index = draw(0, 1, 2, n + 1, 4), torch.ones(1, n + 1), torch.arange(n + 1)[None]
    for part in ToMe(keep=7, blocks=4).parts():
        assert isinstance(part, ToMeBlock)
        signals = Signals.of(
            visual=torch.arange(keys.shape[2])[None], keys=keys, sizes=sizes, grid=grid,
            class_token=torch.tensor([0]), original=torch.tensor([n + 1]),
        )
        got = part(signals)
        assert int(got.sequence[0, 0]) == 0 and float(got.sizes[0, 0]) == 1.0 and float(got.sizes.sum()) == n + 1
        merged = got.apply(keys.transpose(1, 2).flatten(2))
        keys = merged.view(1, merged.shape[1], 2, 4).transpose(1, 2)
        grid, sizes = grid[:, got.sequence[0]], got.sizes
        index = index[:, got.sequence[0]]
    assert index.shape[1] == 8 and index[0].tolist() == sorted(index[0].tolist())


def test_tome_in_the_language_model_ends_at_its_budget() -> None:
    keys = draw(5, 2, 2, 20, 4)
    visual = torch.stack([torch.arange(20), torch.where(torch.arange(20) < 9, torch.arange(20), PAD)])
    got = ToMeLLM(keep=3)(Signals.of(visual=visual, keys=keys))
    assert got.counts.tolist() == [3, 3] and got.sizes.sum(dim=1).tolist() == [20.0, 9.0]


def test_windows_share_the_patches_out_and_know_their_similarity() -> None:
    rows, columns = 5, 7
    place = torch.arange(rows * columns)
    grid = torch.stack([0 * place, 0 * place, place // columns, place % columns], dim=1)[None]
    x = draw(4, 1, rows * columns, 8)
    home, first = windows(grid, rows_of(rows * columns), 2)
    assert first.tolist() == [[0, 2, 4, 14, 16, 18]]
    assert (home == PAD).sum() == 35 - 24
    for w, similarity in enumerate(window_similarity(x, home, first)[0]):
        inside = (home[0] == w).nonzero()[:, 0].tolist()
        pairs = [cosine_twin(x[0, i], x[0, j]) for i in inside for j in inside if i != j]
        assert len(inside) == 4 and abs(float(similarity) - sum(pairs) / len(pairs)) < 1e-5


@QUICK
@given(st.integers(0, 99), st.integers(2, 12), st.data())
def test_cache_buckets_are_nearest_anchors(seed: int, n: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(2, n))
    received = draw(seed, 1, n).abs()
    got = ElasticCache(keep=keep)(Signals.of(visual=torch.arange(n)[None], received=received))
    anchors = got.keep[0].tolist()
    inner = sorted(range(1, n - 1), key=lambda i: (-float(received[0, i]), i))[: keep - 2]
    assert anchors == sorted({0, n - 1, *inner})
    nearest = [min(range(keep), key=lambda a: (abs(anchors[a] - i), a)) for i in range(n)]
    assert buckets(got.keep, rows_of(n))[0].tolist() == nearest
    assert torch.equal(got.members().sum(dim=1), torch.ones(1, n, dtype=torch.int64))
    if keep == n:
        assert torch.equal(got.apply(received[..., None]), received[..., None])
