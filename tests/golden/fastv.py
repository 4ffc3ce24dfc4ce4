"""FastV's selection: in place, lmms-eval and EPIC."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dart_lab.pruners.fastv import FastV
from dart_lab.pruners.signals import Signals
from tests.golden.case import Case


def run(case: Case) -> None:
    p = case.params
    if "model" in p:
        rows, span, layer = rows_of_model(case), p["span"], p["K"]
        pruner = FastV(keep=float(p["ratio_kept"]), budget="official", rounding="int", layer=layer)
    elif "fast_v_attention_rank" in p:
        rows = case.inputs["last_rows"]
        span = (p["fast_v_sys_length"], p["fast_v_sys_length"] + p["fast_v_image_token_length"])
        pruner = FastV(keep=p["fast_v_attention_rank"], layer=p["fast_v_agg_layer"])
    else:
        rows = case.inputs["last_rows"]
        span = (p["image_token_start_index"], p["image_token_start_index"] + p["image_token_length"])
        pruner = FastV(reduction_ratio=p["reduction_ratio"], budget="official", rounding="int")
    check(case.outputs, pruner, last_row_signals(rows, span), span[0])


def last_row_signals(rows: Tensor, span: tuple[int, int]) -> Signals:
    """Signals that offer the last query's attention `(heads, sequence)` and refuse any other query."""
    length = rows.shape[1]

    def attention(queries: Tensor) -> Tensor:
        assert queries.tolist() == [[length - 1]]
        return rows[None, :, None, :]

    return Signals(
        visual=torch.arange(*span)[None], attended=torch.ones(1, length, dtype=torch.bool),
        providers={"attention": attention},
    )


def check(want: dict[str, Any], pruner: FastV, signals: Signals, start: int) -> None:
    got = pruner(signals)
    kept = got.keep[0] + start
    for name in ("kept_sorted", "kept_image_tokens_sorted", "kept_image_tokens"):
        if name in want:
            assert torch.equal(kept, want[name].sort().values)
    if "n_kept" in want:
        assert got.counts.tolist() == [want["n_kept"]]
    if "topk_order" in want:
        offset = int(want["topk_order"].min() - got.order[0].min())  # counted in the image, or in the sequence
        assert offset in (0, start)
        assert torch.equal(got.order[0] + offset, want["topk_order"])
    if "image_scores" in want:
        torch.testing.assert_close(got.score[0], want["image_scores"], atol=1e-6, rtol=0)
    if "keep_indexs" in want:
        stays = torch.ones(signals.attended.shape[1], dtype=torch.bool)
        stays[signals.visual[0]] = got.mask()[0]
        assert torch.equal(stays.nonzero()[:, 0], want["keep_indexs"])


def rows_of_model(case: Case) -> Tensor:
    """Attention of the last token in layer K−1, `(heads, sequence)`, from the stock model that the case names."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(case.model(case.params["model"]), attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(inputs_embeds=case.inputs["inputs_embeds"], output_attentions=True, use_cache=False)
    return out.attentions[case.params["K"] - 1][0, :, -1]
