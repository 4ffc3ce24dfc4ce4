"""Sweeps share their prefix: the answers of many conditions from one run of what they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.vlm.branching import Answers, Trunk, branch_rows, first_margin, grow, pad_token, whole_rows
from dart_lab.vlm.deepstack import deepstack_layers
from dart_lab.vlm.insert import adapter_for, check_method, prune
from dart_lab.vlm.locate import layout, model_of
from dart_lab.vlm.run import Run, Sample
from dart_lab.vlm.tower_memo import TowerMemo
from dart_lab.vlm.vision import watched_blocks
from dart_lab.vlm.vlm import check_left_padding

MEMORY = 1 << 30  # bytes that the caches of conditions which run together may take
SLACK = 1 / 8  # padding that conditions of unlike length may cost, as a share of the shortest


@dataclass(eq=False)
class Branch:
    """What one condition gave.

    Attributes:
        tokens: `(batch, new)` int64 on the CPU: the answer, padding after its end.
        run: what was kept.
        shared: whether it continued from the common prefix.
        reason: why it ran alone; empty if it did not.
        encoded_once: whether its picture features came from the one run of the vision tower.
        margin: `(batch,)` float32: by how much the first token leads the next one; NaN where logits are broken.
        logits: `(batch, new, vocabulary)` float32 on the CPU, where asked for.
    """

    tokens: Tensor
    run: Run
    shared: bool
    reason: str
    encoded_once: bool
    margin: Tensor
    logits: Tensor | None = None


def branch(
    model: Any,
    inputs: Mapping[str, Any],
    pruners: Sequence[Pruner | None],
    *,
    max_new_tokens: int = 16,
    share: bool = True,
    memory: int | None = None,
    logits: bool = False,
) -> list[Branch]:
    """Answer a batch of prompts under many conditions, greedily; the same answers as each condition alone.

    The vision tower and the decoder layers below the first cut run once. Conditions that cut first at the same layer
    continue from there together, those of nearly equal length as rows of one batch. A condition that cannot share the
    decoder's layers (it acts in front of them, on the cache, or ranks anew at every step) runs through them alone and
    says why; the vision tower runs again only for one that changes it.

    Args:
        model: a supported Hugging Face model object, or a `VLM`.
        inputs: what the processor returned, left padded.
        pruners: the conditions; None: nothing is pruned.
        max_new_tokens: length at which an answer is cut. Default 16.
        share: False runs every condition alone, for comparison.
        memory: bytes that the KV caches of conditions which run together may take. Default 1 GiB; one condition always
            runs.
        logits: keep the logits of every step.

    Returns:
        One `Branch` a condition, in the same order.

    Raises:
        DartLabError: no conditions, no visual tokens, right padding, a memory that is not above 0, or as `prune`.

    >>> import dart_lab as dl
    >>> vlm, sample = dl.load("tiny"), dl.load_task("shapes", n=1, seed=0)[0]
    >>> inputs = vlm.prepare([sample.image], [sample.question])
    >>> out = branch(vlm, inputs, [None, *(dl.pruners.DART(keep=n) for n in (32, 64))], max_new_tokens=2)
    >>> [one.run.got for one in out], [one.shared for one in out]
    ([[576], [32], [64]], [True, True, True])
    """
    if not pruners or max_new_tokens < 1:
        raise DartLabError("branch needs at least one condition and one new token, for example [None, DART(keep=64)]")
    if memory is not None and memory <= 0:
        raise DartLabError(f"memory={memory}: give a number of bytes above 0, or None")
    for pruner in pruners:
        if pruner is not None:
            check_method(pruner)
    check_left_padding(inputs)
    model = model_of(model)
    reasons = {i: "sharing is switched off" if not share else unshared(model, p) for i, p in enumerate(pruners)}
    apart = {i: reason for i, reason in reasons.items() if reason}
    own = {i: pruner for i, pruner in enumerate(pruners) if i not in apart and pruner is not None}
    whole = [i for i, pruner in enumerate(pruners) if i not in apart and pruner is None]
    out: dict[int, Branch] = {}
    with _encoding(model, [pruners[i] for i in apart], bool(own or whole)) if share else nullcontext():
        for i, reason in apart.items():
            once = share and not _changes_tower(pruners[i])
            out[i] = _alone(model, inputs, pruners[i], reason, once, max_new_tokens, logits)
        if own or whole:
            family = adapter_for(model, None)
            trunk = grow(model, family, inputs, own, bool(whole))
    if own or whole:
        for group in _groups(model, trunk, own, memory or MEMORY):
            members, runs = [own[i] for i in group], [Run() for _ in group]
            found = branch_rows(model, family, trunk, group, members, runs, max_new_tokens, logits)
            batch = len(trunk.attended)
            for place, (i, run) in enumerate(zip(group, runs, strict=True)):
                out[i] = _branch(found.rows(place * batch, (place + 1) * batch), run)
        if whole:
            found = whole_rows(model, trunk, max_new_tokens, logits).rows(0, len(trunk.attended))
            for i in whole:
                out[i] = _branch(
                    found, Run([Sample(s.tokens, s.token_ids, s.images, s.view) for s in trunk.now.samples])
                )
    return [out[i] for i in range(len(pruners))]


def _branch(found: Answers, run: Run) -> Branch:
    return Branch(found.tokens, run, True, "", True, found.margin, found.logits)


def _encoding(model: Any, apart: Sequence[Pruner | None], together: bool) -> AbstractContextManager[Any]:
    """What makes the vision tower run once for conditions `apart` and for those `together`, if there are several."""
    takers = [pruner for pruner in apart if not _changes_tower(pruner)]
    if not takers or (len(takers) == 1 and not together):
        return nullcontext()
    return TowerMemo(model, watched_blocks(model, [part for p in takers if p is not None for part in p.parts()]))


def _changes_tower(pruner: Pruner | None) -> bool:
    return pruner is not None and any(part.stage.kind == "VIT_BLOCK" for part in pruner.parts())


def unshared(model: Any, pruner: Pruner | None) -> str:
    """Why a condition cannot continue from a common prefix; empty if it can."""
    options = model.generation_config
    if (
        getattr(options, "repetition_penalty", None) not in (None, 1.0)
        or (getattr(options, "no_repeat_ngram_size", None) or 0) > 0
    ):
        return "the model's generation settings change logits by what was said before"
    if pruner is None:
        return ""
    if getattr(pruner, "rerank", False):
        return "it ranks anew at every step"
    kinds = [part.stage.kind for part in pruner.parts()]
    outside = [kind for kind in kinds if kind != "LLM_LAYER"]
    if outside:
        return f"it acts at {outside[0]}, not only inside the decoder"
    early = deepstack_layers(model)
    if any(part.stage.layer < early for part in pruner.parts()):
        return f"the model adds picture features behind its first {early} layers"
    return ""


def _groups(model: Any, trunk: Trunk, own: Mapping[int, Pruner], memory: int) -> list[list[int]]:
    """Conditions that run together: same first layer and positions, one stage each, little padding, in memory."""
    kept: dict[int, int] = {}
    for fork in trunk.forks.values():
        kept |= {i: int(reduction.counts.max()) for i, (reduction, _) in fork.decisions.items()}
    groups: list[list[int]] = []
    used, longest = 0, 0.0
    open_key: tuple[Any, ...] | None = None
    order = sorted(
        own, key=lambda i: (own[i].parts()[0].stage.layer, own[i].positions, len(own[i].parts()), kept[i], i)
    )
    for i in order:
        first, length = own[i].parts()[0].stage.layer, _text(trunk) + kept[i]
        key = (first, own[i].positions) if len(own[i].parts()) == 1 else ("alone", i)
        size = _bytes(model, trunk, first, kept[i])
        if not groups or key != open_key or length > longest or used + size > memory:
            groups.append([])
            used, longest, open_key = 0, (1 + SLACK) * length, key
        groups[-1].append(i)
        used += size
    return groups


def _text(trunk: Trunk) -> int:
    """Columns of the prompt that are no visual token."""
    return trunk.now.length - (int(trunk.now.visual.sum(dim=1).max()) if trunk.now.visual is not None else 0)


def _bytes(model: Any, trunk: Trunk, first: int, kept: int) -> int:
    """Bytes of a condition's KV cache and of its states, for all samples; of shared layers one at a time is whole."""
    keys = trunk.cache.layers[0].keys
    depth, length = model.config.get_text_config().num_hidden_layers, trunk.now.length
    slots = length + (depth - first) * (_text(trunk) + kept)
    cache = 2 * keys.shape[0] * keys.shape[1] * keys.shape[3] * slots
    states = keys.shape[0] * length * model.config.get_text_config().hidden_size
    return int((cache + states) * keys.element_size())


def _alone(
    model: Any, inputs: Mapping[str, Any], pruner: Pruner | None, reason: str, once: bool, steps: int, logits: bool
) -> Branch:
    """One condition through `generate`."""
    options = {
        "max_new_tokens": steps, "do_sample": False, "pad_token_id": pad_token(model),
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    with torch.no_grad():
        if pruner is None:
            samples = [Sample(tokens, None) for tokens in layout(model, inputs).samples]
            run, found = Run(samples), model.generate(**inputs, **options)
        else:
            with prune(model, pruner) as run:
                found = model.generate(**inputs, **options)
    tokens = found.sequences[:, inputs["input_ids"].shape[1] :].cpu()
    seen = torch.stack([step.float() for step in found.logits], dim=1).cpu() if logits else None
    return Branch(tokens, run, False, reason, once, first_margin(found.logits[0]).cpu(), seen)
