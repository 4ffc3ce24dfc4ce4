"""DART in Qwen2.5-VL's own text model (three rotary axes), against the authors' modified class."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from dart_lab.pruners import DART
from dart_lab.vlm.insert import prune
from tests.golden.case import Case
from tests.golden.e2e import check_selection, check_states, close
from tests.vlm.stepping import cache_from, cache_name, lengths


def run(case: Case) -> None:
    p, want = case.params, case.outputs
    text, head = load(case)
    config = p["DART_config"]
    first = p["image_start"]
    span = (first, first + config["image_token_length"])
    embeds = case.inputs["inputs_embeds"]
    visual = torch.zeros(embeds.shape[:2], dtype=torch.bool)
    visual[:, slice(*span)] = True
    pruner = DART(
        reduction_ratio=config["reduction_ratio"], layer=p["K"], image_pivots=config["pivot_image_token"],
        text_pivots=config["pivot_text_token"], budget="official",
    )
    positions = rotary_positions(len(embeds[0]), first, *p["grid_h_w"])
    assert torch.equal(positions[:, 0], want["position_ids_3rows"])
    states: dict[str, Tensor] = {}
    for index, layer in enumerate(text.layers):
        layer.register_forward_pre_hook(noted(states, f"hidden_{index}"))
    with torch.no_grad(), prune(text, pruner, visual=visual) as record:
        out = text(
            inputs_embeds=embeds, position_ids=positions, attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
            use_cache=True,
        )
        cache, logits = cache_from(out), head(out.last_hidden_state)
        held = lengths(cache)
        found, tokens = [logits[0, -1]], []
        for step in range(len(want["decode_tokens"])):
            tokens.append(int(found[-1].argmax()))
            more = text(
                inputs_embeds=text.embed_tokens(torch.tensor([[tokens[-1]]])), use_cache=True,
                position_ids=torch.full((3, 1, 1), want["next_position"] + step), **{cache_name(text): cache},
                attention_mask=torch.ones(1, embeds.shape[1] + step + 1, dtype=torch.long),
            )
            cache = cache_from(more)
            found.append(head(more.last_hidden_state)[0, -1])
    check_selection(case, record, span)
    stays = torch.ones(embeds.shape[1], dtype=torch.bool)
    stays[visual[0]] = False
    stays[torch.from_numpy(record.positions[0])] = True
    check_states(case, {**states, "prefill_logits": logits[0]}, stays)
    assert held == want["kv_lengths"]
    assert lengths(cache) == want["decode_kv_lengths"]
    assert tokens == want["decode_tokens"].tolist()
    close(torch.stack(found[: len(want["decode_logits"])]), want["decode_logits"], case)


def load(case: Case) -> tuple[Any, nn.Linear]:
    folder = case.model(case.params["model"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    text = Qwen2_5_VLTextModel._from_config(Qwen2_5_VLTextConfig(**config), attn_implementation="sdpa").eval()
    text.load_state_dict({name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.")})
    head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
    head.weight.data = weights["lm_head.weight"]
    return text, head


def rotary_positions(length: int, first: int, rows: int, columns: int) -> Tensor:
    """`(3, 1, length)`: time, row and column; text counts up on all three, behind the picture's larger side."""
    ids = torch.arange(length).expand(3, -1).clone()
    end = first + rows * columns
    cell = torch.arange(rows * columns)
    ids[:, first:end] = first + torch.stack([torch.zeros_like(cell), cell // columns, cell % columns])
    ids[:, end:] = first + max(rows, columns) + torch.arange(length - end)
    return ids[:, None]


def noted(states: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        states.setdefault(name, args[0][0])

    return hook
