"""Whole models cut at several layers: PyramidDrop and SparseVLM, against the authors' modified models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from dart_lab.pruners.base import Pruner
from dart_lab.pruners.clustering import Clusters, dpc_knn
from dart_lab.pruners.pyramiddrop import PyramidDrop
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.sparsevlm import OFFICIAL_HEADS, SparseVLM
from dart_lab.pruners.staged import Staged
from dart_lab.vlm.insert import prune
from dart_lab.vlm.run import Run
from tests.golden.case import Case
from tests.golden.e2e import check_steps, close
from tests.vlm.stepping import decode

GROUPED_PROMPT = (40, 8, 24)  # length, start and number of visual tokens, where the case stores none
ROUNDING = 1e-7  # of scores, which are about 1e-3


def run(case: Case) -> None:
    model = LlamaForCausalLM.from_pretrained(case.model(case.params["model"]), attn_implementation="eager").eval()
    if "exception" in case.outputs:
        check_grouped_heads(model)
        return
    embeds = case.inputs["inputs_embeds"]
    visual = torch.zeros(embeds.shape[:2], dtype=torch.bool)
    start = case.params["image_start"]
    visual[:, start : start + case.params["image_len"]] = True
    pruner = (pyramiddrop if case.record["method"] == "e2e_pdrop" else sparsevlm)(case)
    if pruner.positions == "original":
        check_first_cut(case, model, pruner, visual)
        kept = {layer: case.outputs[f"layer{layer}_kept_local"].tolist() for layer in case.params["pruned_layers"]}
        pruner = Replay(kept=tuple((layer + 1, tuple(tokens)) for layer, tokens in kept.items()))
    short: dict[str, Tensor] = {}  # what leaves the last layer, before it is put back into its full length
    hook = model.model.layers[-1].register_forward_hook(keep_first(short, "states"))
    with noisy_densities(), prune(model, pruner, visual=visual) as record:
        steps = decode(model, {"inputs_embeds": embeds}, len(case.outputs["decode_tokens"]))
    hook.remove()
    if isinstance(pruner, PyramidDrop):
        check_pyramid(case, record, start)
    elif isinstance(pruner, SparseVLM):
        check_sparse(case, record, start)
    with torch.no_grad():
        final = model.model.norm(short["states"])
        close(model.lm_head(final), case.outputs["prefill_logits"], case)
    if "final_hidden" in case.outputs:
        close(final, case.outputs["final_hidden"], case)
    check_steps(case, steps, embeds.shape[1])


@contextmanager
def noisy_densities() -> Iterator[None]:
    """The noise that the released clustering adds, as it was drawn for the records: from seed 0, stage after stage.

    With two or three neighbours, nearest pairs have the very same density, and the noise decides between them.
    """
    generator = torch.Generator().manual_seed(0)

    def noisy(x: Tensor, *args: Any, **kwargs: Any) -> Clusters:
        return dpc_knn(x, *args, **kwargs, noise=1e-6 * torch.rand(x.shape[:2], generator=generator))

    with patch("dart_lab.pruners.sparsevlm.dpc_knn", noisy):
        yield


def pyramiddrop(case: Case) -> Pruner:
    p = case.params
    return PyramidDrop(
        layers=tuple(p["layer_list"]), schedule=tuple(p["image_token_ratio_list"][1:]), budget="official"
    )


def sparsevlm(case: Case) -> Pruner:
    p = case.params
    version = "v2" if str(p["USE_VERSION"]).startswith("2") else "v1"
    layers = tuple(layer + 1 for layer in p["pruned_layers"])
    method = SparseVLM(keep=p["RETAIN_TOKN"], version=version, layers=layers, budget="official")
    assert list(method.counts() or ()) == p["schedule"]
    return method


def check_pyramid(case: Case, record: Run, start: int) -> None:
    want = case.outputs
    for i, decision in enumerate(record.samples[0].decisions):
        assert decision.layer == want[f"stage{i}_rank_layer"] and len(decision.kept) == want[f"stage{i}_keep"]
        original = want[f"stage{i}_kept_original_positions"].tolist()
        assert sorted(decision.kept.tolist()) == sorted(p - start if min(original) >= start else p for p in original)


def check_sparse(case: Case, record: Run, start: int) -> None:
    """Follow the visual block: survivors ascending, then the merged tokens, named after their centres."""
    want, block = case.outputs, list(range(case.params["image_len"]))
    for layer, decision in zip(case.params["pruned_layers"], record.samples[0].decisions, strict=True):
        assert len(block) == want[f"layer{layer}_v_token_num_before"]
        raters = [int(p) for p in decision.notes["raters"] if p >= 0]
        assert [p - start - len(block) for p in raters] == want["rater_idx_after_image"].tolist()
        close(torch.from_numpy(decision.score)[block], want[f"layer{layer}_scores"], case)
        centres = [int(i) for i in decision.notes.get("centres", [])]
        survivors = [i for i, token in enumerate(block) if token in decision.kept and i not in centres]
        assert survivors == want[f"layer{layer}_kept_local"].tolist()
        if f"layer{layer}_dropped_local_considered_order" in want:
            pool = decision.notes["pool"].tolist()
            deleted = [i for i in range(len(block)) if i not in survivors]
            order = [deleted[i] for i in want[f"layer{layer}_dropped_local_considered_order"].tolist()]
            same_order(pool, order, want[f"layer{layer}_scores"])
            assert centres == [order[i] for i in want[f"layer{layer}_centers"].tolist()]
            cluster = dict(zip(pool, decision.notes["member"].tolist(), strict=True))
            assert [cluster[i] for i in order] == want[f"layer{layer}_cluster_of_token"].tolist()
        block = [block[i] for i in survivors + centres]


def same_order(found: list[int], want: list[int], scores: Tensor) -> None:
    """Tokens whose recorded scores a processor's rounding can exchange may stand in either order."""
    assert sorted(found) == sorted(want)
    torch.testing.assert_close(scores[found], scores[want], atol=ROUNDING, rtol=0)


@dataclass(frozen=True, kw_only=True)
class Replay(Staged):
    """Cuts that keep recorded sets: layer → visual tokens of those still there."""

    name: ClassVar[str] = "replay"
    kept: tuple[tuple[int, tuple[int, ...]], ...]

    def _needs_keep(self) -> bool:
        return False

    def parts(self) -> tuple[Pruner, ...]:
        return tuple(ReplayStage(layer=layer, tokens=tokens) for layer, tokens in self.kept)


@dataclass(frozen=True, kw_only=True)
class ReplayStage(Pruner):
    """Keeps the tokens it was given."""

    name: ClassVar[str] = "replay-stage"
    needs: ClassVar[frozenset[str]] = frozenset()
    tokens: tuple[int, ...]

    def _needs_keep(self) -> bool:
        return False

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        return Reduction(keep=torch.tensor([self.tokens]), size=signals.counts, asked=asked)


def check_first_cut(case: Case, model: Any, pruner: Pruner, visual: Tensor) -> None:
    """Version 2 divides attention by a number that changes sign; ours does not. Rated as ours says, by hand."""
    embeds, want, start = case.inputs["inputs_embeds"], case.outputs, case.params["image_start"]
    first = case.params["pruned_layers"][0]
    with torch.no_grad(), prune(model, pruner, visual=visual) as record:
        model(inputs_embeds=embeds)
    with torch.no_grad():
        maps = model(inputs_embeds=embeds, output_attentions=True, use_cache=False).attentions[first][0]
    decision = record.samples[0].decisions[0]
    raters = [int(p) for p in decision.notes["raters"]]
    text = start + case.params["image_len"]
    assert [p - text for p in raters] == want["rater_idx_after_image"].tolist()
    seen = maps[:, raters, start:text]
    heads = seen.sum(dim=(1, 2)).topk(min(OFFICIAL_HEADS, len(seen))).indices
    score = seen[heads].mean(dim=(0, 1))
    torch.testing.assert_close(torch.from_numpy(decision.score), score, atol=1e-6, rtol=0)
    assert len(decision.kept) == len(want[f"layer{first}_kept_local"])
    assert decision.kept.tolist() == score.topk(len(decision.kept)).indices.sort().values.tolist()


def check_grouped_heads(model: Any) -> None:
    """Where the released ranking crashes, on grouped key heads: dropping equals masking, which computes it anew."""
    length, start, number = GROUPED_PROMPT
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randint(-64, 64, (1, length, model.config.hidden_size), generator=generator).float() / 64
    visual = torch.zeros(1, length, dtype=torch.bool)
    visual[:, start : start + number] = True
    with torch.no_grad(), prune(model, PyramidDrop(layers=(2,), schedule=(0.5,)), visual=visual) as record:
        model(inputs_embeds=embeds)
    rows = ahead_by_hand(model, embeds, layer=2)
    expected = rows[start : start + number].topk(number // 2).indices.sort().values
    assert record.kept[0].tolist() == expected.tolist()


def ahead_by_hand(model: Any, embeds: Tensor, layer: int) -> Tensor:
    """Attention of the last token in `layer`, mean over heads, from the stock eager model: `(sequence,)`."""
    with torch.no_grad():
        out = model(inputs_embeds=embeds, output_attentions=True, use_cache=False)
    return out.attentions[layer][0, :, -1].mean(dim=0)


def keep_first(states: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: Any, args: Any, output: Any) -> None:
        states.setdefault(name, (output[0] if isinstance(output, tuple) else output)[0])

    return hook
