"""ToMe's bipartite soft matching and its k-th token variant."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.pruners.assignment import in_order, slot_of, unmerge
from dart_lab.pruners.matching import Matching, bipartite_match, match_in_groups, merge_matched, most_merges
from dart_lab.pruners.reduction import PAD, Reduction
from tests.golden.case import Case


def run(case: Case) -> None:
    if case.function.startswith("kth"):
        check_groups(case)
    else:
        check_bipartite(case)


def all_valid(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)


def counts_of(x: Tensor) -> Tensor:
    return torch.full((len(x),), x.shape[1])


def check_bipartite(case: Case) -> None:
    metric, x, want, p = case.inputs["metric"], case.inputs["x"], case.outputs, case.params
    protected = torch.zeros(metric.shape[:2], dtype=torch.bool)
    special = [p.get("class_token", False), p.get("distill_token", False)]
    protected[:, :2] = torch.tensor(special)[: protected.shape[1]]  # tokens 0 and 1
    match = bipartite_match(
        metric, torch.full((len(x),), p["r"]), all_valid(x), protected if any(special) else None
    )
    assert match.sequence().shape == (len(x), want["n_out"])
    if "r_effective" in want:
        assert (match.source != PAD).sum(dim=1).tolist() == [want["r_effective"]] * len(x)
        assert most_merges(counts_of(x), protected).min() >= want["r_effective"]
    if "returns" in want:  # nothing to merge
        assert torch.equal(merge_matched(match, counts_of(x)).apply(x), x)
    if "src_idx_into_even_set" in want:
        check_indices(match, want)
    check_merged(case, match, distilled=special[1])


def check_indices(match: Matching, want: dict[str, Tensor]) -> None:
    assert torch.equal(match.source, 2 * want["src_idx_into_even_set"])
    assert torch.equal(match.target, 2 * want["dst_idx_into_odd_set"] + 1)
    assert torch.equal(match.unmerged, 2 * want["unm_idx_into_even_set"])


def check_merged(case: Case, match: Matching, *, distilled: bool) -> None:
    x, want = case.inputs["x"], case.outputs
    size = case.inputs["size2"][..., 0] if "size2" in case.inputs else None

    def merged(sizes: Tensor | None = None, mode: str = "mean") -> Reduction:
        reduction = merge_matched(match, counts_of(x), sizes=sizes, mode=mode)
        return distillation_second(reduction, x.shape[1]) if distilled else reduction

    plain, total = merged(), merged(mode="sum")
    weighted = merged(size) if size is not None else plain
    got = {
        "merged_mean": plain.apply(x), "merged_sum": total.apply(x), "wavg_x": plain.apply(x),
        "wavg_size": plain.sizes[..., None],
        "wavg_x_size2": weighted.apply(x), "wavg_size_size2": weighted.sizes[..., None],
        "unmerge_of_merged_mean": unmerge(plain.apply(x), plain), "source_adjacency": plain.members().float(),
    }
    for name in got.keys() & want.keys():
        torch.testing.assert_close(got[name], want[name], atol=case.record["tolerance"]["merged"], rtol=0, msg=name)
    if "source_argmax_group_of_token" in want:
        assert torch.equal(plain.members().long().argmax(dim=1), want["source_argmax_group_of_token"])


def distillation_second(reduction: Reduction, n: int) -> Reduction:
    """The order of a tower with two special tokens: both of them first, then the rest as it was."""
    key = slot_of(reduction.sequence, n)
    key[:, 0], key[:, 1] = -2, -1
    return in_order(reduction, key)


def check_groups(case: Case) -> None:
    metric, x, want, k = case.inputs["metric"], case.inputs["x"], case.outputs, case.params["k"]
    mean, total = (match_in_groups(metric, k, all_valid(x), mode=mode, tail="drop") for mode in ("mean", "sum"))
    assert mean.counts.tolist() == [want["n_out"]] * len(x)
    home = mean.members().long().argmax(dim=1)
    whole = x.shape[1] // k * k
    sources = [i for i in range(whole) if i % k != k - 1]
    if "dst_idx" in want:
        assert torch.equal(home[:, sources], want["dst_idx"])
    for name, value in {
        "merged_mean": mean.apply(x), "merged_sum": total.apply(x), "unmerge": unmerge(mean.apply(x), mean)[:, :whole],
    }.items():
        if name in want:
            torch.testing.assert_close(value, want[name], atol=case.record["tolerance"]["merged"], rtol=0, msg=name)
