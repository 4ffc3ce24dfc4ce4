"""Drop visual tokens at decoder layer K by hooks alone: gather, run short, scatter back.

A forward pre-hook on every layer ≥ K shortens what the layer receives: states (at K), rotary tables, positions and both
axes of the mask. Tokens keep their original positions. The KV cache comes out ragged: full below K, short from K on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.pruners.reduction import PAD, Reduction, gather_tokens, mask_to_rows
from dart_lab.pruners.signals import Signals
from dart_lab.vlm import compat, ragged
from dart_lab.vlm.cuts import Cut, make_cut, select_positions
from dart_lab.vlm.families import Family
from dart_lab.vlm.passes import Pass, PassWatcher
from dart_lab.vlm.run import Sample
from dart_lab.vlm.tap import Captured, Tap, attention_rows

Decide = Callable[[int, Signals, "list[Sample]", Tensor], Reduction | None]


class Dropper(PassWatcher):
    """While attached, asks `decide` before each layer in `stages` and drops what it says.

    `decide(layer, signals, samples, number)` gets the signals at that layer, the samples (one for every `expand` rows)
    and
    `number` `(batch, n)`, which visual token of the sample each visual token of the signals is. It returns a
    `Reduction`, or None to leave the sequence as it is.
    """

    def __init__(
        self, model: Any, family: Family | None, visual: Tensor | None, *, stages: Iterable[int], decide: Decide,
        compact: Iterable[int] = (), again_each_step: bool = False,
    ) -> None:
        super().__init__(model, family, visual)
        self.stages = sorted(set(stages))
        self._decide, self._again, self._compact = decide, again_each_step, frozenset(compact)
        depth = len(self.text.layers)
        if self.stages[-1] >= depth:
            raise DartLabError(
                f"layer={self.stages[-1]}, but {type(model).__name__} has {depth} decoder layers; give a layer from 1 to {depth - 1}"
            )
        compat.refuse_unsafe_layers(model, self.stages[0])
        self._tap = Tap(model, [stage - 1 for stage in self.stages], self._observe)

    def attach(self) -> None:
        super().attach()
        self._undo.append(self._tap.__exit__)
        self._tap.__enter__()
        layers = self.text.layers
        for index in range(self.stages[0], len(layers)):
            self._hook(layers[index].register_forward_pre_hook(self._before(index), with_kwargs=True))
            self._hook(layers[index].register_forward_hook(self._after(index), with_kwargs=True))

    def _observe(self, layer: int, captured: Captured) -> None:
        now = self.current
        if now is not None and now.visual is not None and layer + 1 not in now.cuts:
            now.captured[layer] = captured

    def continue_prompt(self, now: Pass) -> None:
        """Without a cache every step runs the whole prompt: hold to what was decided, and let new tokens through."""
        if self._again or self.prompt is None:
            return
        before = self.prompt.current
        new = torch.arange(before.length, now.length, device=self.prompt.ids.device)
        slots = before.length
        for layer, cut in sorted(before.cuts.items()):
            now.cuts[layer] = cut.extended(new, slots, before.length)
            slots = cut.rows.shape[1]

    def _before(self, index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            now = self.current
            if now is None:
                return None
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            held = now.step > 0 and not self._again
            if index in self.stages and now.visual is not None and index not in now.cuts and not held:
                self._ask(index, now, states, compat.cache_of(kwargs))
            cut = now.cut_at(index)
            layer = compat.cache_layer(compat.cache_of(kwargs), index)
            known = ragged.columns_of(layer, now.past)
            if cut is None and known is None:
                return None
            kwargs = dict(kwargs)
            if cut is not None and cut.layer == index:
                states = cut.states(states)
            hollow = ragged.has_empty_slots(layer) or (cut is not None and cut.hollow)
            key = (None if cut is None else cut.layer, None if known is None else known.shape[1])
            columns = _once(now, ("columns", key), None, lambda _: _columns(now, cut, known, len(states), states.device))
            self._shorten(now, cut, columns, hollow, kwargs, states, key)
            now.held[index] = columns, hollow
            if args:
                return (states, *args[1:]), kwargs
            kwargs["hidden_states"] = states
            return args, kwargs

        return hook

    def _after(self, index: int) -> Callable[..., Any]:
        last = index == len(self.text.layers) - 1

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            now = self.current
            cut = now.cut_at(index) if now is not None else None
            if now is None or cut is None:
                return None
            layer = compat.cache_layer(compat.cache_of(kwargs), index)
            if layer is not None:
                columns, hollow = now.held[index]
                ragged.remember(layer, columns, now.total, hollow)
            if not last:
                return None
            if isinstance(output, tuple):
                return (cut.scatter(output[0], now.length), *output[1:])
            return cut.scatter(output, now.length)

        return hook

    def _ask(self, index: int, now: Pass, states: Tensor, cache: Any) -> None:
        """Collect the signals before layer `index`, let the method decide, note the cut."""
        if now.visual is None:
            return
        previous = now.cut_at(index)
        everything = torch.arange(now.length, device=states.device).expand(states.shape[0], -1)
        rows = everything if previous is None else previous.rows.to(states.device)
        visual = torch.gather(now.visual.to(states.device), 1, rows.clamp(min=0)) & (rows != PAD)
        positions = mask_to_rows(visual)
        numbers = (now.visual.to(states.device).cumsum(dim=1) - 1).gather(1, rows.clamp(min=0))
        number = torch.where(positions == PAD, PAD, numbers.gather(1, positions.clamp(min=0)))
        signals = self._signals(index, now, states, rows, positions, number, cache)
        reduction = self._decide(index, signals, now.samples, number)
        now.captured.pop(index - 1, None)
        if reduction is None or (reduction.merge is None and torch.equal(reduction.counts, signals.counts)):
            return
        now.cuts[index] = make_cut(
            reduction, layer=index, rows=rows, visual=visual, positions=positions, compact=index in self._compact
        )

    def _signals(
        self, index: int, now: Pass, states: Tensor, rows: Tensor, positions: Tensor, number: Tensor, cache: Any
    ) -> Signals:
        attended = rows != PAD
        if now.attended is not None:
            attended = attended & now.attended.to(states.device)[:, now.past :].gather(1, rows.clamp(min=0))
        captured = now.captured[index - 1]
        known = ragged.columns_of(compat.cache_layer(cache, index - 1), now.past)
        before = now.past if known is None else known.shape[1]
        here = slice(before, before + rows.shape[1])
        grid = None
        if now.layout is not None:
            places = torch.from_numpy(now.layout.grid_index()).to(states.device)
            grid = places.gather(1, number.clamp(min=0)[:, :, None].expand(-1, -1, places.shape[2]))
            grid = grid.masked_fill((number == PAD)[:, :, None], PAD)
        return Signals(
            visual=positions,
            attended=attended,
            grid=grid,
            sample_seeds=lambda: self.seeds(now),
            providers={
                "hidden": lambda: states,
                "normed": lambda: self.text.norm(states),
                "keys": lambda: captured.key[:, :, here],
                "values": lambda: captured.value[:, :, here],
                "attention": lambda queries: attention_rows(captured, queries, before)[..., here],
            },
        )

    def _shorten(
        self, now: Pass, cut: Cut | None, columns: Tensor, hollow: bool, kwargs: dict[str, Any], states: Tensor, key: Any
    ) -> None:
        """Rewrite a layer's keyword arguments to the rows and columns that it really has; once a pass, not once a layer."""
        device, cache = states.device, compat.cache_layer(compat.cache_of(kwargs), self.stages[0])
        rows = None if cut is None else cut.rows.to(device)
        if rows is not None:
            for name in ("position_embeddings", "position_ids"):
                if kwargs.get(name) is not None:
                    kwargs[name] = _once(now, (name, key), kwargs[name], lambda value: select_positions(value, rows))
        kwargs["attention_mask"] = _once(
            now, ("mask", key), kwargs.get("attention_mask"),
            lambda mask: ragged.short_mask(
                mask, rows=rows, columns=columns, hollow=hollow, past=now.past, length=now.length,
                attended=now.attended, width=compat.fixed_length(cache), backend=compat.backend_of(self.text), dtype=states.dtype,
            ),
        )
        if kwargs.get("cache_position") is not None:  # releases before 5.4: where a static cache writes
            kwargs["cache_position"] = torch.arange(columns.shape[1] - states.shape[1], columns.shape[1], device=device)


def _once(now: Pass, key: Any, value: Any, compute: Callable[[Any], Any]) -> Any:
    """`compute(value)`, remembered for the layers that get the same `value` in this pass."""
    stored = now.memo.get(key)
    if stored is None or stored[0] is not value:
        stored = now.memo[key] = (value, compute(value))
    return stored[1]


def _columns(now: Pass, cut: Cut | None, known: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """`(batch, keys)` columns that a layer holds after this pass, -1 for empty slots."""
    if known is None:
        known = torch.arange(now.past, device=device).expand(batch, -1)
    if cut is None:
        new = torch.arange(now.past, now.total, device=device).expand(batch, -1)
    else:
        rows = cut.rows.to(device)
        new = torch.where(rows == PAD, PAD, rows + now.past)
    return torch.cat([known.to(device), new], dim=1)
