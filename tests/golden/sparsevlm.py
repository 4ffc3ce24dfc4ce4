"""SparseVLM's cut by raters, its choice of heads and its clustering; the older rule by rank, also in MustDrop."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dart_lab.pruners.assignment import merge_assigned
from dart_lab.pruners.clustering import dpc_knn
from dart_lab.pruners.raters import most_attentive_heads
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.sparsevlm import SparseVLM, SparseVLMStage
from tests.golden.case import Case


def run(case: Case) -> None:
    if case.function.endswith("cluster_and_merge"):
        check_clusters(case)
    elif case.function.endswith("select_attn_head_by_sum"):
        check_heads(case)
    elif case.function.endswith("attn_postprocess_rank"):
        check_rank(case)
    else:
        check_cut(case)


def rater_signals(rows: Tensor, start: int, number: int, raters: list[int]) -> Signals:
    """Signals with attention `(heads, text, sequence)` of the text, whose raters come out as the given ones."""
    text = start + number
    embeds = torch.zeros(1, text + rows.shape[1], 1)
    embeds[0, start:text] = 1.0
    embeds[0, [text + j for j in raters]] = 1.0

    def attention(queries: Tensor) -> Tensor:
        return rows[None][:, :, queries[0].clamp(min=text) - text]

    return Signals(
        visual=torch.arange(start, text)[None], attended=torch.ones(1, embeds.shape[1], dtype=torch.bool),
        providers={"attention": attention, "embeds": lambda: embeds},
    )


def cut_signals(case: Case) -> Signals:
    p = case.params
    return rater_signals(case.inputs["text_rows"], p["v_token_start"], p["v_token_num"], p["text_rater_idx"])


def check_cut(case: Case) -> None:
    p, want, signals = case.params, case.outputs, cut_signals(case)
    version = "v2" if str(p["USE_VERSION"]).startswith("2") else "v1"
    method = SparseVLM(keep=p["RETAIN_TOKN"], version=version, budget="official")
    assert list(method.counts()) == p["schedule"]
    index = p["layer_dict"][str(p["layer_idx"])]
    stage = method.parts()[index]
    assert isinstance(stage, SparseVLMStage) and stage.layer == p["layer_idx"] + 1
    got = replace(stage, recycle=False, heads=1.0)(signals)
    rated = (got.notes["raters"][0] - p["v_token_start"] - p["v_token_num"]).tolist()
    assert rated == p["text_rater_idx"]
    assert got.keep[0].tolist() == want["kept_sorted"].tolist() and got.counts.tolist() == [want["n_kept"]]
    torch.testing.assert_close(got.score[0], want["relation_vis_text"], atol=1e-6, rtol=0)


def check_rank(case: Case) -> None:
    p, want = case.params, case.outputs
    stage = SparseVLMStage(rank_scale=float(p["scale"]), rank_bias=float(p["bias"]), recycle=False)
    got = stage(cut_signals(case))
    assert got.keep[0].tolist() == want["kept_sorted"].tolist()


def check_heads(case: Case) -> None:
    """The chosen heads by the sum of what raters give the image; their order is that of the sums."""
    p, want = case.params, case.outputs
    (rows,) = case.inputs.values()
    rows = rows.reshape(-1, *rows.shape[-2:])
    start, number = p["v_token_start"], p["v_token_num"]
    if rows.shape[1] == rows.shape[2]:  # whole maps: the text comes after the image
        rows = rows[:, start + number :]
    raters = p.get("text_rater_idx", list(range(rows.shape[1])))
    seen = rows[None, :, raters, start : start + number]
    order = most_attentive_heads(seen, torch.ones(1, len(raters), dtype=torch.bool), min(14, len(rows)))
    assert order[0].tolist() == torch.as_tensor(want["selected_head_order"]).reshape(-1).tolist()


def check_clusters(case: Case) -> None:
    x, want = case.inputs["x"], case.outputs
    valid = torch.ones(x.shape[:2], dtype=torch.bool)
    found = dpc_knn(x, torch.full((len(x),), case.params["cluster_num"]), valid)
    assert torch.equal(found.centre, want["center_indices_by_score_desc"])
    assert torch.equal(found.member, want["cluster_of_token"])
    merge, _ = merge_assigned(found.member, found.centre.shape[1])
    merged = merge.apply(x, found.centre.shape[1])
    torch.testing.assert_close(merged, want["merged"], atol=case.record["tolerance"]["merged"], rtol=0)
    for ours, name in ((found.density, "density_seed0"), (found.score, "score_last")):
        if name in want:  # made with noise of up to 1e-6 on the density
            torch.testing.assert_close(ours, want[name], atol=1e-5 if name == "score_last" else 2e-6, rtol=0)
