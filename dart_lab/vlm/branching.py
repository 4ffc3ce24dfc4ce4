"""Several conditions from one prompt: the layers that they share run once, the rest of each continues from there.

The unpruned prompt runs once with its cache. At every layer K at which some condition cuts, its state and the layer's
arguments are kept. A condition then continues from K on its own short sequence, through the model's own layers; several
conditions at the same K continue together, as rows of one batch. Decoding goes through the model as usual, on caches
that are put together from the shared layers below K and the condition's own ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import PAD, Reduction, mask_to_rows
from dart_lab.pruners.signals import Signals
from dart_lab.vlm import compat
from dart_lab.vlm.arguments import renumbers
from dart_lab.vlm.cuts import Cut, make_cut
from dart_lab.vlm.dropping import Dropper
from dart_lab.vlm.families import Family
from dart_lab.vlm.insert import active, record
from dart_lab.vlm.passes import Pass
from dart_lab.vlm.prefix_cache import shared_cache
from dart_lab.vlm.run import Run, Sample


@dataclass(eq=False)
class Fork:
    """The unpruned prompt before layer K, and what each condition that cuts there has decided."""

    states: Tensor
    kwargs: dict[str, Any]
    decisions: dict[int, tuple[Reduction, Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class Trunk:
    """One unpruned prompt: its forks by layer, cache, positions, and its last logits if it ran to the end."""

    now: Pass
    cache: Any
    forks: dict[int, Fork]
    attended: Tensor
    positions: Tensor
    logits: Tensor | None
    watcher: Dropper


@dataclass(frozen=True, eq=False)
class Answers:
    """Greedy answers: `tokens` `(rows, new)`, `margin` `(rows,)`, `logits` `(rows, new, vocabulary)` if kept."""

    tokens: Tensor
    margin: Tensor
    logits: Tensor | None

    def rows(self, start: int, stop: int) -> Answers:
        """Some of the rows, on the CPU."""
        logits = None if self.logits is None else self.logits[start:stop].cpu()
        return Answers(self.tokens[start:stop].cpu(), self.margin[start:stop].cpu(), logits)


class _Enough(Exception):
    """Every fork is there, and nobody asked for the unpruned answer."""


class _Forker(Dropper):
    """Runs the prompt unpruned and keeps what stands before every layer at which a condition cuts."""

    def __init__(self, model: Any, family: Family | None, conditions: Mapping[int, Pruner], stop: bool) -> None:
        self.forks: dict[int, Fork] = {}
        self.positions: Tensor | None = None
        self._first_parts = {number: pruner.parts()[0] for number, pruner in conditions.items()}
        self._stop = stop
        super().__init__(
            model, family, None, stages=[part.stage.layer for part in self._first_parts.values()],
            decide=self._decide_all,
            needs={need for pruner in conditions.values() for part in pruner.parts() for need in part.needs},
        )  # fmt: skip

    def _begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        super()._begin(module, args, kwargs)
        self.positions = kwargs.get("position_ids")

    def _ask(self, index: int, now: Pass, states: Tensor, kwargs: dict[str, Any]) -> None:
        self.forks[index] = Fork(states, {name: value for name, value in kwargs.items() if name not in _CACHE_NAMES})
        super()._ask(index, now, states, kwargs)
        if self._stop and index == max(self.stages):
            raise _Enough

    def _decide_all(self, layer: int, signals: Signals, samples: list[Sample], number: Tensor) -> None:
        for index, part in self._first_parts.items():
            if part.stage.layer == layer:
                self.forks[layer].decisions[index] = (part(signals), number)


_CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "use_cache", "cache_position", "hidden_states")


class _Branches(Dropper):
    """Rows of several conditions from layer K on; later stages of a single condition act as they always do."""

    def __init__(self, model: Any, family: Family | None, first: int, parts: Sequence[Pruner], decide: Any) -> None:
        later = [part for part in parts if part.stage.layer > first]
        super().__init__(
            model, family, None, stages=[part.stage.layer for part in later], decide=decide,
            compact=[part.stage.layer for part in later if renumbers(model, part)],
            needs={need for part in later for need in part.needs},
        )  # fmt: skip
        self._first, self._restore = first, False


def grow(
    model: Any, family: Family | None, inputs: Mapping[str, Any], conditions: Mapping[int, Pruner], whole: bool
) -> Trunk:
    """Run the prompt once.

    Args:
        model, family: the model and its adapter.
        inputs: what the processor returned, left padded.
        conditions: number of the condition → its method, all of whose parts act inside the decoder.
        whole: run to the end, for the unpruned answer.
    """
    forker = _Forker(model, family, conditions, stop=not whole)
    text, cache, out = compat.text_model(model), compat.new_cache(), None
    with active(model, forker), torch.no_grad(), suppress(_Enough):
        given = {**compat.with_positions(model, inputs), compat.cache_argument(model): cache}
        out = model(**given, use_cache=True, logits_to_keep=1)
    now = forker.current
    if now is None or now.visual is None:
        raise DartLabError("there is nothing to branch: the inputs have no visual tokens (a text-only prompt?)")
    length, device = now.length, next(text.parameters()).device
    attended = torch.ones(len(now.visual), length, dtype=torch.bool, device=device)
    if now.attended is not None:
        attended = now.attended.to(device)
    positions = forker.positions
    if positions is None:  # the text model counts from the first column
        positions = torch.arange(length, device=device)[None]
    logits = None if out is None else out.logits[:, -1].float()
    return Trunk(now, cache, forker.forks, attended, positions, logits, forker)


def branch_rows(
    model: Any,
    family: Family | None,
    trunk: Trunk,
    numbers: Sequence[int],
    pruners: Sequence[Pruner],
    runs: list[Run],
    steps: int,
    keep_logits: bool,
) -> Answers:
    """Continue some conditions that cut first at the same layer, as rows of one batch.

    Args:
        trunk: the shared prompt.
        numbers: which conditions; several only if each has a single stage.
        pruners, runs: of these conditions.
        steps: tokens to generate, greedily.
        keep_logits: keep those of every step.

    Returns:
        Their answers, row by row: those of the first condition, then those of the second …
    """
    first = pruners[0].parts()[0].stage.layer
    fork, now = trunk.forks[first], trunk.now
    copies, batch = len(numbers), len(trunk.attended)
    cuts, samples = [], []
    for number, pruner, run in zip(numbers, pruners, runs, strict=True):
        reduction, visual_number = fork.decisions[number]
        own = [Sample(s.tokens, s.token_ids, s.images, s.view) for s in now.samples]
        record(run, pruner, reduction, own, visual_number, stage=pruner.parts()[0].stage)
        samples.append(own)
        cuts.append(_cut(reduction, first, now, compact=renumbers(model, pruner.parts()[0])))
    states = _stack([cut.states(fork.states) for cut in cuts], fork.states.shape[2])
    padded = fork.kwargs.get("attention_mask") is not None
    cut = Cut(
        first - 1,  # the states are cut already: no layer has to
        _stack([cut.rows for cut in cuts]), torch.empty(0), hollow=any(cut.hollow for cut in cuts) or _uneven(cuts),
        ordered=not padded and all(cut.ordered for cut in cuts), compact=cuts[0].compact,
    )  # fmt: skip
    parts = {part.stage.layer: part for part in pruners[0].parts()}

    def decide(layer: int, signals: Signals, seen: list[Sample], visual_number: Tensor) -> Reduction:
        reduction = parts[layer](signals)
        record(runs[0], pruners[0], reduction, seen, visual_number, stage=parts[layer].stage)
        return reduction

    watcher = _Branches(model, family, first, list(parts.values()), decide)
    watcher.take_prompt(trunk.watcher)
    text = compat.text_model(model)
    cache = shared_cache(trunk.cache, first, now.length, copies)  # decoding of the unpruned answer may have gone on
    with active(model, watcher), torch.no_grad():
        watcher.current = replace(
            now, visual=_repeat(now.visual, copies), attended=_repeat(now.attended, copies), samples=samples[0],
            decided=set(range(first + 1)), cuts={first - 1: cut}, entered=dict(now.entered), captured={}, held={},
            memo={},
        )  # fmt: skip
        kwargs = {name: _repeat_argument(name, value, copies, batch) for name, value in fork.kwargs.items()}
        for layer in text.layers[first:]:
            states = _first(layer(states, **kwargs, **{compat.cache_argument(layer): cache}, use_cache=True))
        logits = model.get_output_embeddings()(text.norm(states[:, -1:]))[:, -1].float()
        return _decode(model, trunk, cache, logits, copies, steps, keep_logits)


def whole_rows(model: Any, trunk: Trunk, steps: int, keep_logits: bool) -> Answers:
    """The unpruned answers. Uses up the trunk's cache."""
    if trunk.logits is None:
        raise DartLabError("the unpruned prompt did not run to its end")
    with torch.no_grad():
        return _decode(model, trunk, trunk.cache, trunk.logits, 1, steps, keep_logits)


def first_margin(logits: Tensor) -> Tensor:
    """`(batch,)` float32: by how much the first token of an answer leads the next one; NaN for broken logits.

    >>> first_margin(torch.tensor([[0.0, 3.0, 1.0]]))
    tensor([2.])
    """
    best = logits.float().topk(min(2, logits.shape[-1]), dim=-1).values
    return (best[:, 0] - best[:, -1]).where(logits.isfinite().all(dim=-1), torch.nan)


def _cut(reduction: Reduction, first: int, now: Pass, *, compact: bool) -> Cut:
    visual = now.visual
    if visual is None:
        raise DartLabError("there is no prompt with visual tokens in this pass")
    rows = torch.arange(now.length, device=visual.device).expand(len(visual), -1)
    return make_cut(reduction, layer=first, rows=rows, visual=visual, positions=mask_to_rows(visual), compact=compact)


def _decode(
    model: Any, trunk: Trunk, cache: Any, logits: Tensor, copies: int, steps: int, keep_logits: bool
) -> Answers:
    """Greedy decoding on a cache; rows that have ended give padding."""
    ends, pad = end_tokens(model), pad_token(model)
    mask = _repeat(trunk.attended, copies).long()
    last = trunk.positions[..., -1:]
    last = (last if last.dim() == 2 else last.amax(dim=0)).expand(len(trunk.attended), -1)
    position, leading = _repeat(last, copies), trunk.positions.shape[:-2]
    done = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    margin, seen, tokens = first_margin(logits), [], []
    for step in range(steps):
        token = logits.argmax(dim=-1).masked_fill(done, pad)
        if keep_logits:
            seen.append(logits)
        tokens.append(token)
        done = done | torch.isin(token, ends)
        if bool(done.all()) or step == steps - 1:
            break
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        position = position + 1
        out = model(
            input_ids=token[:, None],
            attention_mask=mask,
            use_cache=True,
            position_ids=position.expand(*leading, *position.shape),
            **{compat.cache_argument(model): cache},
        )
        logits = out.logits[:, -1].float()
    return Answers(torch.stack(tokens, dim=1), margin, torch.stack(seen, dim=1) if seen else None)


def end_tokens(model: Any) -> Tensor:
    """Token ids at which an answer ends, `(n,)` int64."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    listed = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return torch.tensor(listed, dtype=torch.int64, device=model.device)


def pad_token(model: Any) -> int:
    """The token that follows an ended answer."""
    pad = getattr(model.generation_config, "pad_token_id", None)
    ends = end_tokens(model)
    return int(pad) if pad is not None else int(ends[0]) if len(ends) else 0


def _stack(parts: Sequence[Tensor], channels: int = 0) -> Tensor:
    """Rows of several conditions on top of each other, right-aligned; -1 (or 0 for states) in front of shorter ones."""
    width = max(part.shape[1] for part in parts)
    fill = 0.0 if channels else PAD
    shape = (0, 0) if channels else ()
    return torch.cat([torch.nn.functional.pad(part, (*shape, width - part.shape[1], 0), value=fill) for part in parts])


def _uneven(cuts: Sequence[Cut]) -> bool:
    return len({cut.rows.shape[1] for cut in cuts}) > 1


def _repeat(value: Tensor | None, copies: int) -> Any:
    return None if value is None else value.repeat(copies, *[1] * (value.dim() - 1))


def _repeat_argument(name: str, value: Any, copies: int, batch: int) -> Any:
    """A layer's argument for `copies` times the rows; what is the same for all rows stays as it is."""
    if isinstance(value, (tuple, list)):
        return type(value)(_repeat_argument(name, part, copies, batch) for part in value)
    if not isinstance(value, Tensor) or name == "attention_mask" or copies == 1:
        return value  # a mask is made anew from the columns
    axis = value.dim() - (2 if name == "position_ids" else 3)
    if axis < 0 or value.shape[axis] != batch or batch == 1:
        return value
    return value.repeat(*[copies if i == axis else 1 for i in range(value.dim())])


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
