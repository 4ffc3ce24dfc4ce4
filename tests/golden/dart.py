"""DART's selection: LLaVA by count or ratio, LLaVA-NeXT, Qwen-VL, EPIC and LightCompress."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.dart import DART
from dart_lab.pruners.dart_pivots import pivot_scores
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals
from tests.golden.case import Case
from tests.twins import dart_twin

Span = tuple[int, int]


def run(case: Case) -> None:
    span, pruner, states = span_of(case), pruner_of(case), case.inputs["last_layer_state"]
    visual = torch.arange(*span).expand(len(states), -1)
    signals = Signals.of(visual=visual, normed=states, keys=case.inputs["key_states"])
    if "exception" in case.outputs:
        check_refusal(pruner, signals)
    elif case.function.endswith("accelerated"):
        check_where_official_is_wrong(case, pruner, signals, span[0])
    else:
        check_parity(case, pruner(signals), signals, span[0])


def span_of(case: Case) -> Span:
    p = case.params
    start = p.get("image_token_start_index", p.get("vision_token_start_index"))
    length = p.get("image_token_length", p.get("vision_token_length"))
    if p.get("text_length") is not None:  # LLaVA-NeXT: everything but the text
        length = p["S"] - p["text_length"]
    return start, start + length


def pruner_of(case: Case) -> DART:
    p = case.params
    common = {
        "layer": p.get("K", 2), "image_pivots": p["pivot_image_token"], "text_pivots": p["pivot_text_token"],
        "budget": "official",
    }
    if case.record["method"] == "epic_dart":
        return DART(reduction_ratio=p["reduction_ratio"], official_path="epic", **common)
    if p.get("text_length") is not None:
        return DART(keep=p["retain_token_num_for_llava_next"], official_path="llava_next", **common)
    if p.get("max_num_trunction") is not None:
        return DART(keep=p["max_num_trunction"], **common)
    return DART(reduction_ratio=p["reduction_ratio"], **common)


def check_parity(case: Case, got: Reduction, signals: Signals, start: int) -> None:
    want = case.outputs
    assert torch.equal(got.keep + start, want["kept_sorted"].reshape(len(got.keep), -1))
    assert got.counts.tolist() == [want["n_kept"]] * len(got.keep)
    if "pivot_iteration_order" in want:
        assert got.notes["pivots"][0].tolist() == torch.as_tensor(want["pivot_iteration_order"]).tolist()
    images = case.params["pivot_image_token"]
    if "image_pivots_by_norm_desc" in want:
        assert torch.equal(got.order[0, :images] + start, want["image_pivots_by_norm_desc"])
        assert set(want["text_pivots_by_norm_desc"].tolist()) <= set(got.notes["pivots"][0].tolist())
    if "picks_per_round" in want:
        picks = want["picks_per_round"]
        assert torch.equal(got.order[0, images:].reshape(picks.shape) + start, picks)
    if "per_pivot_quota" in want:
        assert set(got.notes["quota"][0].tolist()) == {want["per_pivot_quota"]}
    if "key_l1_image" in want:
        for ours, theirs in zip(pivot_scores(signals, "k_norm", 0), ("key_l1_image", "key_l1_text"), strict=True):
            torch.testing.assert_close(ours[0], want[theirs], atol=case.record["tolerance"]["key_l1"], rtol=0)
    if "keep_indexs_full_sequence" in want:
        assert torch.equal(full_sequence(got, signals), want["keep_indexs_full_sequence"])


def full_sequence(got: Reduction, signals: Signals) -> Tensor:
    """Positions of everything that stays: all text, and the kept visual tokens."""
    stays = torch.ones(signals.attended.shape[1], dtype=torch.bool)
    stays[signals.visual[0]] = got.mask()[0]
    return stays.nonzero()[:, 0]


def check_refusal(pruner: DART, signals: Signals) -> None:
    """Where the released code crashes, its budget is refused with a way out, and the exact budget works."""
    with pytest.raises(DartLabError, match="exact"):
        pruner(signals)
    wanted = pruner.keep if pruner.reduction_ratio is None else max(1 - pruner.reduction_ratio, 1e-9)
    exact = DART(keep=wanted, image_pivots=pruner.image_pivots, text_pivots=pruner.text_pivots)
    got = exact(signals)
    assert torch.equal(got.counts, exact.asked(signals))


def check_where_official_is_wrong(case: Case, pruner: DART, signals: Signals, start: int) -> None:
    """EPIC's batched selector keeps the most similar tokens: ours keeps as many, and the least similar ones."""
    got = pruner(signals)
    assert got.counts.tolist() == [case.outputs["n_kept"]] * len(got.keep)
    for row in range(len(got.keep)):
        span = range(start, start + int(got.size[row]))
        twin = dart_twin(
            case.inputs["last_layer_state"][row], case.inputs["key_states"][row], span,
            quotas=got.notes["quota"][row].tolist(), pivots=got.notes["pivots"][row].tolist(),
        )
        assert got.keep[row].tolist() == [position - start for position in twin]
