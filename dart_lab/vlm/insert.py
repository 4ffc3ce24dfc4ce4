"""`prune`: two lines around anybody's own model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.pruners.base import Pruner, Stage
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.signals import Signals
from dart_lab.vlm.arguments import renumbers
from dart_lab.vlm.cache_stage import DecideCache
from dart_lab.vlm.dropping import Decide, Dropper
from dart_lab.vlm.families import Family, family_of, find_family
from dart_lab.vlm.front import FRONT_KINDS, FrontDropper
from dart_lab.vlm.locate import model_of
from dart_lab.vlm.passes import PassWatcher
from dart_lab.vlm.reranking import Reranker
from dart_lab.vlm.role_signals import Roles, RoleSignals
from dart_lab.vlm.run import Decision, Run, Sample
from dart_lab.vlm.vision import CLASS_TOKEN_PLACE

if TYPE_CHECKING:
    from dart_lab.vlm.vlm import VLM

_ACTIVE = "_dart_lab_active"


@contextmanager
def prune(
    model: Any | VLM, pruner: Pruner, *, visual: Tensor | None = None, roles: Sequence[Roles] | None = None
) -> Iterator[Run]:
    """Drop visual tokens while the block runs; yields the `Run` that records what was kept.

    Works with forward passes and `generate` (greedy, sampling, beams, with or without cache), any batch, left padding,
    and kept sets that differ from row to row. Tokens keep their original positions. Leaving the block, also by an
    exception, takes every hook out again. A block inside another one on the same model takes its place until it ends.

    Args:
        model: a supported Hugging Face model object, or a `VLM`.
        pruner: the method.
        visual: `(batch, sequence)` bool, which tokens are visual, for callers that bring `inputs_embeds`, and for any
            decoder that dart-lab has no adapter for.
        roles: what `Protect(role=…)` and `Remove(role=…)` look at: for each sample, in the order in which the block
            meets them, role → `(n,)` bool over its visual tokens, for example what `Rolebook.assign` returns.

    Raises:
        DartLabError: an unsupported model, a layer beyond the last one, or a model that cannot be pruned rightly.

    Warns:
        DartLabWarning: nothing was pruned, because no prompt with visual tokens was run.

    >>> import dart_lab as dl
    >>> vlm, sample = dl.load("tiny"), dl.load_task("shapes", n=1, seed=0)[0]
    >>> with dl.prune(vlm.model, dl.pruners.DART(keep=64)) as run:
    ...     out = vlm.model.generate(**vlm.prepare([sample.image], [sample.question]))
    >>> len(run.kept[0]), run.asked
    (64, [64])
    """
    check_method(pruner)
    model = model_of(model)
    run = Run()
    with active(model, _watcher(model, pruner, visual, run, roles)):
        yield run
    if not run.samples:
        warnings.warn(
            f"{pruner.name}: nothing was pruned: no prompt with visual tokens was run", DartLabWarning, stacklevel=3
        )


def check_method(pruner: object) -> None:
    """Raise `DartLabError` unless this is a method, with its parameters."""
    if not isinstance(pruner, Pruner):
        raise DartLabError(f"{pruner!r} is no method; give one with its parameters, such as DART(keep=64)")


def adapter_for(model: Any, visual: Tensor | None) -> Family | None:
    """The model's family; None is allowed where `visual` marks the tokens."""
    return family_of(model) if visual is None else find_family(model)


@contextmanager
def active(model: Any, watcher: Any) -> Iterator[None]:
    """Attach a watcher; one that was active before is suspended meanwhile. Everything is undone at the end."""
    stack = vars(model).setdefault(_ACTIVE, [])
    try:
        if stack:
            stack[-1].detach()
        stack.append(watcher)
        watcher.attach()
        yield
    finally:
        watcher.detach()
        if watcher in stack:
            stack.remove(watcher)
        if stack:
            stack[-1].attach()
        else:
            vars(model).pop(_ACTIVE, None)


def current_watcher(model: Any) -> PassWatcher | None:
    """The watcher that is attached to a model now, or None."""
    stack = vars(model).get(_ACTIVE)
    return stack[-1] if stack else None


def _watcher(
    model: Any, pruner: Pruner, visual: Tensor | None, run: Run, roles: Sequence[Roles] | None = None
) -> PassWatcher:
    """The hooks for a method: drop once, or, for a method with `rerank`, mask anew at every step."""
    family = adapter_for(model, visual)
    if getattr(pruner, "rerank", False):
        run.mode = "mask"
        return Reranker(model, family, visual, pruner=pruner, record=partial(record, run, pruner))
    layers, front = split_parts(model, pruner.parts())
    decide, in_cache = _decider(pruner, run), _cache_decider(pruner, run)
    if not front:
        return _with_roles(Dropper(model, family, visual, decide=decide, decide_cache=in_cache, **layers), roles)

    def note(part: Pruner, reduction: Reduction, samples: list[Sample], number: Tensor) -> None:
        record(run, pruner, reduction, samples, number, stage=part.stage)

    return _with_roles(
        FrontDropper(model, family, visual, decide=decide, decide_cache=in_cache, front=front, note=note, **layers),
        roles,
    )


def _with_roles(watcher: PassWatcher, roles: Sequence[Roles] | None) -> PassWatcher:
    watcher.roles = None if roles is None else RoleSignals(roles)
    return watcher


def split_parts(model: Any, parts: Sequence[Pruner]) -> tuple[dict[str, Any], list[Pruner]]:
    """What a `Dropper` must know of the parts inside the decoder, and the parts in front of it."""
    inside = [part for part in parts if part.stage.kind == "LLM_LAYER"]
    front = [part for part in parts if part.stage.kind in FRONT_KINDS]
    layers = {
        "cache": [part for part in parts if part.stage.kind == "POST_PREFILL_CACHE"],
        "stages": [part.stage.layer for part in inside],
        "compact": [part.stage.layer for part in inside if renumbers(model, part)],
        "needs": {need for part in inside for need in part.needs},
    }
    return layers, front


def _decider(pruner: Pruner, run: Run) -> Decide:
    parts = {part.stage.layer: part for part in pruner.parts() if part.stage.kind == "LLM_LAYER"}

    def decide(layer: int, signals: Signals, samples: list[Sample], number: Tensor) -> Reduction:
        reduction = parts[layer](signals)
        record(run, pruner, reduction, samples, number, stage=parts[layer].stage)
        return reduction

    return decide


def _cache_decider(pruner: Pruner, run: Run) -> DecideCache:
    """Ask a part about one layer's cache, and count what it keeps there."""

    def decide(part: Pruner, layer: int, signals: Signals, samples: list[Sample]) -> Reduction:
        reduction = part(signals)
        if samples and not any(sample is samples[0] for sample in run.samples[-len(samples) :]):
            run.samples.extend(samples)  # no stage before this one has noted them
        run.cached[layer] = reduction.counts.tolist()
        return reduction

    return decide


def record(
    run: Run,
    pruner: Pruner,
    reduction: Reduction,
    samples: list[Sample],
    number: Tensor,
    step: int = 0,
    stage: Stage | None = None,
) -> None:
    """Note a decision about every sample; `number` `(batch, n)`: which visual token each token of the reduction is."""
    each, stage = len(number) // len(samples), stage or pruner.stage
    arrays = {
        "number": number,
        "keep": reduction.keep,
        "order": reduction.order,
        "score": reduction.score,
        "asked": reduction.asked,
        **{f"note {name}": note for name, note in reduction.notes.items()},
    }
    if reduction.merge is not None:
        arrays["sequence"], arrays["members"] = reduction.sequence, reduction.members()
    host = {name: value.detach().cpu().numpy() for name, value in arrays.items() if value is not None}
    for index, sample in enumerate(samples):
        known = {name: value[index * each] for name, value in host.items()}
        here, first = known["number"], not sample.decisions
        hosts = known.get(f"note {CLASS_TOKEN_PLACE}", np.empty(0, dtype=np.int64))
        hosts = hosts[hosts != PAD]
        score = None
        if "score" in known:
            score = np.full(len(sample.tokens), np.nan, dtype=np.float32)
            score[here[here != PAD]] = known["score"][: len(here)][here != PAD]
        sample.decisions.append(
            Decision(
                method=pruner.name,
                parameters=pruner.parameters(),
                stage=stage.kind,
                layer=stage.layer,
                step=step,
                asked=int(known["asked"]),
                kept=_numbers(here, known["keep"], hosts),
                order=_numbers(here, known["order"], hosts) if "order" in known else None,
                score=score,
                extra=len(hosts),
                members=_members(known, hosts, len(sample.tokens)) if "members" in known else None,
                notes={name.removeprefix("note "): note for name, note in known.items() if name.startswith("note ")},
            )
        )
        if first:
            run.samples.append(sample)


def _numbers(number: np.ndarray, index: np.ndarray, hosts: np.ndarray) -> np.ndarray:
    """The visual tokens that indices stand for; without places that a class token took."""
    index = index[(index != PAD) & ~np.isin(index, hosts)]
    return number[index].astype(np.int64)


def _members(known: Mapping[str, np.ndarray], hosts: np.ndarray, tokens: int) -> np.ndarray:
    """`(kept tokens, tokens)` bool, kept tokens ascending: which visual tokens were merged into each of them."""
    sequence, number = known["sequence"], known["number"]
    slots = np.flatnonzero((sequence != PAD) & ~np.isin(sequence, hosts))
    slots = slots[np.argsort(sequence[slots], kind="stable")]
    real = number != PAD
    out = np.zeros((len(slots), tokens), dtype=bool)
    out[:, number[real]] = known["members"][slots][:, : len(number)][:, real]
    return out


__all__ = ["DartLabError", "active", "adapter_for", "current_watcher", "prune", "record"]
