"""`record`: attach a probe to an unmodified model, alone or together with `prune`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.probes.attention_mass import (
    AFTER,
    BEFORE,
    BOS,
    GENERATED,
    OUTSIDE,
    AttentionMass,
    MassTrace,
    group_mass,
)
from dart_lab.probes.attention_mass import Pass as MassPass
from dart_lab.pruners.reduction import PAD
from dart_lab.vlm import compat, layout
from dart_lab.vlm.insert import active, adapter_for, current_watcher
from dart_lab.vlm.locate import model_of
from dart_lab.vlm.passes import Pass, PassWatcher
from dart_lab.vlm.tap import Captured, Tap

if TYPE_CHECKING:
    from dart_lab.vlm.vlm import VLM


@contextmanager
def record(model: Any | VLM, probe: AttentionMass, *, visual: Tensor | None = None) -> Iterator[MassTrace]:
    """Record group-level attention mass while the block runs; the model's numbers do not change.

    Works in prefill and decode, with any attention kernel, batch and padding, inside and outside a `prune` block: a
    pruned run keeps the groups of the original prompt, and the mass is that over the tokens that are left.

    Args:
        model: a supported Hugging Face model object, or a `VLM`.
        probe: what to record.
        visual: as in `prune`.

    Yields:
        The trace, which fills as the model runs.

    Raises:
        DartLabError: an unsupported model, a layer that does not exist, or groups that do not fit the samples.

    >>> import dart_lab as dl
    >>> vlm, sample = dl.load("tiny"), dl.load_task("shapes", n=1, seed=0)[0]
    >>> with dl.record(vlm.model, dl.AttentionMass(layers=[1])) as trace:
    ...     out = vlm.model(**vlm.prepare([sample.image], [sample.question]))
    >>> last = trace.table().query("query == 'last'").set_index("key")["mass"]
    >>> list(last.index), round(float(last.sum()), 4)
    (['bos', 'before', 'visual', 'after', 'generated'], 1.0)
    """
    if not isinstance(probe, AttentionMass):
        raise DartLabError(f"{probe!r} is no probe; give one such as AttentionMass()")
    model = model_of(model)
    text = compat.text_model(model)
    depth = len(text.layers)
    layers = sorted(set(range(depth) if probe.layers is None else probe.layers))
    if not layers or layers[0] < 0 or layers[-1] >= depth:
        raise DartLabError(
            f"layers={list(probe.layers or ())}: {type(model).__name__} has decoder layers 0 to {depth - 1}"
        )
    trace = MassTrace(probe, compat.backend_of(text))
    recorder = _Recorder(model, probe, trace)
    with ExitStack() as stack:
        if current_watcher(model) is None:
            stack.enter_context(active(model, PassWatcher(model, adapter_for(model, visual), visual)))
        stack.enter_context(Tap({layer: text.layers[layer] for layer in layers}, recorder.observe))
        yield trace


class _Recorder:
    """Knows the group of every column that the model has seen, and turns attention calls into masses."""

    def __init__(self, model: Any, probe: AttentionMass, trace: MassTrace) -> None:
        self._model, self._probe, self._trace = model, probe, trace
        self._now: Pass | None = None
        self._groups = torch.empty(0, 0, dtype=torch.int64)
        self._rows: list[int] = []
        self._seen = 0

    def observe(self, layer: int, captured: Captured) -> None:
        watcher = current_watcher(self._model)
        now = None if watcher is None else watcher.current
        if watcher is None or now is None or captured.attend is None:
            return
        if now is not self._now:
            self._begin(now, watcher, captured.query.device, len(captured.query))
        cut, held = now.cut_at(layer), now.held.get(layer)
        groups = self._groups
        columns = groups if held is None else _pick(groups, held.columns)
        rows = groups[:, now.past :] if cut is None else _pick(groups[:, now.past :], cut.rows)
        names = self._probe.names
        wanted = self._probe.renormalise
        kv_heads, keys, width = captured.key.shape[1:]
        with torch.no_grad():
            values = group_mass(
                captured.attend, rows, columns, len(names), shape=(kv_heads, keys, width), dtype=captured.value.dtype,
                renormalise=None if wanted is None else [names.index(name) for name in wanted],
            )  # fmt: skip
        mass, pairwise, count, visible = (value.cpu().numpy() for value in values)
        self._trace.passes[-1].layers[layer] = (mass, pairwise, count, visible)

    def _begin(self, now: Pass, watcher: PassWatcher, device: torch.device, batch: int) -> None:
        """Extend the groups of the columns by those of a new pass."""
        self._now = now
        new = self._new_groups(now, device, batch)
        if now.step and watcher.prompt is not None:  # without a cache, a prompt runs again with more tokens behind
            new[:, watcher.prompt.current.length :] = self._probe.names.index(GENERATED)
        self._groups = new if not now.past else torch.cat([self._groups.to(device)[:, : now.past], new], dim=1)
        step = 0 if not now.past and not now.step else self._trace.passes[-1].step + 1
        ids = now.ids
        self._trace.passes.append(MassPass(step, self._rows, None if ids is None else ids.cpu().numpy()))

    def _new_groups(self, now: Pass, device: torch.device, batch: int) -> Tensor:
        """`(batch, length)` int64: groups of the tokens that come in."""
        names = self._probe.names
        attended = torch.ones(batch, now.length, dtype=torch.bool, device=device)
        if now.attended is not None:
            attended = now.attended[:, now.past :].to(device)
        if now.visual is None and now.past:
            return torch.where(attended, names.index(GENERATED), OUTSIDE)
        visual = torch.zeros_like(attended) if now.visual is None else now.visual.to(device)
        place = torch.from_numpy(layout.groups(visual.cpu().numpy(), attended.cpu().numpy())).to(device)
        group = torch.full_like(place, OUTSIDE, dtype=torch.int64)
        group[place == layout.BEFORE], group[place == layout.AFTER] = names.index(BEFORE), names.index(AFTER)
        if not now.past:
            first = attended.int().argmax(dim=1, keepdim=True)
            text = group.gather(1, first) != OUTSIDE
            group.scatter_(1, first, group.gather(1, first).where(~text, names.index(BOS)))
        number = visual.cumsum(dim=1) - 1 if now.number is None else now.number.to(device)
        self._note_rows(now, batch)
        for row in range(batch):
            sample = now.samples[row // now.expand] if now.samples else None
            if sample is None:
                continue
            label = torch.from_numpy(self._probe.members(sample, self._rows[row], len(sample.tokens))).to(device)
            group[row, visual[row]] = label[number[row, visual[row]]]
        return group

    def _note_rows(self, now: Pass, batch: int) -> None:
        """Which sample, counted over the block, each row of the batch is."""
        if not now.step:
            self._rows = [self._seen + row // now.expand for row in range(batch)]
            self._seen = self._rows[-1] + 1


def _pick(groups: Tensor, index: Tensor) -> Tensor:
    """Groups of the columns `index` `(batch, n)`; −1 stays −1."""
    index = index.to(groups.device)
    return groups.gather(1, index.clamp(min=0)).masked_fill(index == PAD, OUTSIDE)
