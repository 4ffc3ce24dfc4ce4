"""Whole models: a stock Llama, pruned by hooks, against what the authors' modified models computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, FastV, Pruner
from dart_lab.vlm.insert import prune
from dart_lab.vlm.masking import mask_drop
from dart_lab.vlm.run import Run
from tests.golden.case import Case
from tests.vlm.stepping import Steps, decode, recompute

Span = tuple[int, int]


def run(case: Case) -> None:
    model = LlamaForCausalLM.from_pretrained(
        case.model(case.params["model"]), attn_implementation=case.params.get("attn_implementation", "sdpa")
    ).eval()
    span, pruner = (dart if case.record["method"] == "e2e_dart" else fastv)(case)
    embeds = case.inputs["inputs_embeds"]
    visual = torch.zeros(embeds.shape[:2], dtype=torch.bool)
    visual[:, slice(*span)] = True
    if "exception" in case.outputs or (pruner is not None and pruner.layer >= len(model.model.layers)):
        with pytest.raises(DartLabError), prune(model, pruner, visual=visual):
            model(inputs_embeds=embeds)
        return
    states: dict[str, Tensor] = {}
    depth = len(model.model.layers)
    hooks = [
        layer.register_forward_pre_hook(keep_first(states, f"hidden_{i}")) for i, layer in enumerate(model.model.layers)
    ]
    hooks.append(model.lm_head.register_forward_pre_hook(keep_first(states, f"hidden_{depth}")))  # after the last norm
    with nullcontext(Run()) if pruner is None else prune(model, pruner, visual=visual) as record:
        steps = follow(case, model, embeds)
    for hook in hooks:
        hook.remove()
    stays = torch.ones(embeds.shape[1], dtype=torch.bool)
    if pruner is not None:
        check_selection(case, record, span)
        stays[visual[0]] = False
        stays[torch.from_numpy(record.positions[0])] = True
    check_states(case, {**states, "prefill_logits": steps.prompt[0]}, stays)
    check_steps(case, steps, len(embeds[0]))
    if "decode_exception" in case.outputs:  # the released model raises here; masking the same columns does not
        with mask_drop(model, ~stays[None], layer=pruner.layer):
            masked = decode(model, {"inputs_embeds": embeds}, case.params["n_new"])
        assert torch.equal(steps.tokens, masked.tokens)
        close(torch.stack(steps.logits), torch.stack(masked.logits), case)


def dart(case: Case) -> tuple[Span, DART | None]:
    p, config = case.params, case.params["DART_config"]
    length = p["image_len_static"] if p.get("text_length") is None else p["S"] - p["text_length"]
    span = (p["image_start"], p["image_start"] + length)
    if config is None:
        return span, None
    common: dict[str, Any] = {
        "layer": config["K"], "image_pivots": config["pivot_image_token"], "text_pivots": config["pivot_text_token"],
        "budget": "official",
    }
    if p.get("text_length") is not None:
        return span, DART(keep=config["retain_token_num_for_llava_next"], official_path="llava_next", **common)
    if config["max_num_trunction"] is not None:
        return span, DART(keep=config["max_num_trunction"], **common)
    return span, DART(reduction_ratio=config["reduction_ratio"], **common)


def fastv(case: Case) -> tuple[Span, Pruner]:
    p = case.params["fastv"]
    span = (p["sys"], p["sys"] + p["L"])
    if case.params["decode_mode"] == "cache":  # decided once
        return span, FastV(reduction_ratio=p["r"], budget="official", layer=p["K"])
    return span, FastV(keep=p["keep"], layer=p["K"], rerank=True)


def follow(case: Case, model: Any, embeds: Tensor) -> Steps:
    """Decode as many tokens as the case records, on a cache or by recomputing, as the released model does."""
    steps = case.params.get("n_new") or len(case.outputs["decode_tokens"])
    if case.params.get("decode_mode") == "recompute_rerank":
        return recompute(model, embeds, steps)
    return decode(model, {"inputs_embeds": embeds}, steps)


def check_selection(case: Case, record: Run, span: Span) -> None:
    want, sample = case.outputs, record.samples[0]
    first_decision = sample.decisions[0]
    assert torch.equal(torch.from_numpy(first_decision.kept) + span[0], want["kept_image_tokens"])
    assert list(want.get("image_span", span)) == list(span)
    assert len(record.samples) == 1
    if "pivot_iteration_order" in want:
        assert first_decision.notes["pivots"].tolist() == torch.as_tensor(want["pivot_iteration_order"]).tolist()
    if "image_scores" in want:
        torch.testing.assert_close(torch.from_numpy(first_decision.score), want["image_scores"], atol=1e-6, rtol=0)
    for step, kept in enumerate(want.get("kept_image_tokens_per_step", [])):
        assert sample.decisions[step].step == step
        assert (sample.decisions[step].kept + span[0]).tolist() == kept.tolist(), f"step {step}"


def check_states(case: Case, states: dict[str, Tensor], stays: Tensor) -> None:
    """Compare all rows that the released model has; where ours has more (dropped ones), the kept rows."""
    for name, found in states.items():
        if name in case.outputs:
            want = case.outputs[name]
            close(found if len(found) == len(want) else found[stays], want, case)


def check_steps(case: Case, steps: Steps, prompt: int) -> None:
    want = case.outputs
    for name in ("kv_lengths", "decode_kv_lengths"):
        if name in want:  # taken after some number of fed tokens, which the unpruned first layer tells
            assert steps.lengths[want[name][0] - prompt] == want[name]
    if "decode_tokens" in want:
        number = len(want["decode_tokens"])
        assert steps.tokens[0].tolist()[:number] == want["decode_tokens"].tolist()
        close(torch.stack(steps.logits)[:number, 0], want["decode_logits"], case)


def close(found: Tensor, want: Tensor, case: Case) -> None:
    """The tolerance is for logits, which are about 1; hidden states may differ by as much of their largest value."""
    scale = max(1.0, float(want.abs().max()))
    torch.testing.assert_close(found, want, atol=case.record["tolerance"]["logits"] * scale, rtol=0)


def keep_first(states: dict[str, Tensor], name: str) -> Callable[..., None]:
    """A forward pre-hook that notes a module's first input, batch axis taken off."""

    def hook(module: Any, args: Any) -> None:
        states.setdefault(name, args[0][0])

    return hook
