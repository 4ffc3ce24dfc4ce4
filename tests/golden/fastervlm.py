"""FasterVLM's and VisPruner's selection: crop by crop, and packed for a high-resolution picture."""

from __future__ import annotations

import torch

from dart_lab.pruners.base import Pruner
from dart_lab.pruners.fastervlm import FasterVLM
from dart_lab.pruners.vispruner import VisPruner
from tests.golden.case import Case
from tests.golden.crops import packed, patches


def run(case: Case) -> None:
    signals = patches(case.inputs["cls_attentions"], hidden=case.inputs["image_features"])
    keep = case.params.get("visual_token_num", case.params.get("visual_token_num_per_view"))
    got, want = pruner_of(case, keep)(signals), case.outputs
    assert got.counts.tolist() == [keep] * len(got.keep)
    if "exception" in want:
        return  # the released code crashes; ours keeps what was asked
    if "visual_token_ids_in_order" in want:
        grid = None if case.params["mm_patch_merge_type"] == "flat" else tuple(case.params["grid_w_h"])
        assert packed(got, grid) == want["visual_token_ids_in_order"].tolist()
        assert int(got.counts.sum()) == want["n_visual"]
        return
    assert torch.equal(got.keep, want["kept_sorted"])
    for name in ("topk_order", "selected_indices_official_order"):
        if name in want:
            assert torch.equal(got.order, want[name])
    if "scores_head_mean" in want:
        torch.testing.assert_close(got.score, want["scores_head_mean"], atol=1e-6, rtol=0)
    if "n_important" in want:
        assert got.notes["important"].tolist() == [want["n_important"]] * len(got.keep)
        assert torch.equal(got.order[:, : want["n_important"]], want["important_indices"])


def pruner_of(case: Case, keep: int) -> Pruner:
    share = case.params.get("important_ratio")
    return FasterVLM(keep=keep) if share is None else VisPruner(keep=keep, important=float(share))
