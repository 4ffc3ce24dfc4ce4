"""Drop visual tokens at decoder layer K by hooks alone: gather, run short, scatter back.

A forward pre-hook on every layer ≥ K shortens what the layer receives: states (at K), rotary tables, positions and both
axes of the mask. Tokens keep their original positions. The KV cache comes out ragged: full below K, short from K on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import PAD, Reduction, gather_tokens, mask_to_rows
from dart_lab.pruners.signals import Signals
from dart_lab.vlm import compat, ragged
from dart_lab.vlm.arguments import columns_after, move_positions, once, shorten_mask
from dart_lab.vlm.cache_stage import DecideCache, reduce_caches
from dart_lab.vlm.cuts import Cut, make_cut
from dart_lab.vlm.deepstack import shorten_deepstack
from dart_lab.vlm.families import Family
from dart_lab.vlm.passes import Held, Pass, PassWatcher
from dart_lab.vlm.providers import layer_providers, received
from dart_lab.vlm.run import Sample
from dart_lab.vlm.tap import Captured, Tap

Decide = Callable[[int, Signals, "list[Sample]", Tensor], Reduction | None]


class Dropper(PassWatcher):
    """While attached, asks `decide` before each layer in `stages` and drops what it says.

    `decide(layer, signals, samples, number)` gets the signals at that layer, the samples (one for every `expand` rows)
    and `number` `(batch, n)`, which visual token of the sample each visual token of the signals is. It returns a
    `Reduction`, or None to leave the sequence as it is.
    """

    def __init__(
        self,
        model: Any,
        family: Family | None,
        visual: Tensor | None,
        *,
        stages: Iterable[int],
        decide: Decide,
        compact: Iterable[int] = (),
        needs: Iterable[str] = (),
        cache: Sequence[Pruner] = (),
        decide_cache: DecideCache | None = None,
    ) -> None:
        super().__init__(model, family, visual)
        self.stages = sorted(set(stages))
        self._decide, self._compact, self._needs = decide, frozenset(compact), frozenset(needs)
        self._cache, self._decide_cache = list(cache), decide_cache
        self._marks: dict[str, Tensor] = {}
        self._received: dict[int, Tensor] = {}
        self._ran = -1  # the last layer from the first cut on that has run
        depth = len(self.text.layers)
        acting = [*self.stages, *(part.stage.layer for part in self._cache)]
        outside = [layer for layer in acting if not 1 <= layer < depth]
        if outside:
            raise DartLabError(
                f"layer={outside[0]}, but {type(model).__name__} has {depth} decoder layers; give 1 to {depth - 1}"
            )
        self._first, self._restore = min(acting, default=depth), True
        compat.refuse_unsafe_layers(model, self._first if acting else 0)
        tapped = {stage - 1 for stage in self.stages}
        self._summed = {
            layer for part in self._cache if "received" in part.needs for layer in range(part.stage.layer, depth)
        }
        self._tap = Tap({index: self.text.layers[index] for index in sorted(tapped | self._summed)}, self._observe)

    def attach(self) -> None:
        super().attach()
        self._undo.append(self._tap.__exit__)
        self._tap.__enter__()
        layers = self.text.layers
        recorded = {0} if "embeds" in self._needs else set()
        recorded |= {stage - 1 for stage in self.stages} if "delta" in self._needs else set()
        for index in sorted(recorded):
            self._hook(layers[index].register_forward_pre_hook(self._record(index), with_kwargs=True))
        if self._cache:
            self._hook(self.text.register_forward_hook(self._after_prompt, with_kwargs=True))
        self._undo.append(shorten_deepstack(self.text, self._acting))
        for index in range(self._first, len(layers)):
            self._hook(layers[index].register_forward_pre_hook(self._before(index), with_kwargs=True))
            self._hook(layers[index].register_forward_hook(self._after(index), with_kwargs=True))

    def _acting(self) -> list[Cut]:
        """The cuts behind the layer that ran last, in their order; none once the full length is restored."""
        now = self.current
        if now is None or (self._ran == len(self.text.layers) - 1 and self._restore):
            return []
        return [cut for layer, cut in sorted(now.cuts.items()) if layer <= self._ran]

    def _observe(self, layer: int, captured: Captured) -> None:
        now = self.current
        if now is None or now.visual is None:
            return
        if layer + 1 in self.stages and layer + 1 not in now.decided:
            now.captured[layer] = captured
        if layer in self._summed and now.past == 0:
            self._received[layer] = received(captured, self._real(now, now.cut_at(layer)), 0)

    def _real(self, now: Pass, cut: Cut | None) -> Tensor:
        """`(batch, m)` bool: which tokens of the sequence under a cut are real."""
        if now.visual is None:
            raise DartLabError("there is no prompt with visual tokens in this pass")
        rows = (
            torch.arange(now.length, device=now.visual.device).expand(len(now.visual), -1) if cut is None else cut.rows
        )
        real = rows != PAD
        if now.attended is not None:
            real = real & now.attended.to(rows.device)[:, now.past :].gather(1, rows.clamp(min=0))
        return real

    def _after_prompt(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        now = self.current
        if now is None or now.visual is None or now.past or now.step or self._decide_cache is None:
            return
        cache = compat.cache_of(kwargs) or compat.cache_of(output if isinstance(output, dict) else {})
        reduce_caches(self.text, cache, now, self._cache, self._decide_cache, self._received)
        self._received.clear()

    def _record(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.current is not None and self.current.visual is not None:
                self.current.entered[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def continue_prompt(self, now: Pass) -> None:
        """Without a cache every step runs the whole prompt: hold to what was decided, and let new tokens through."""
        if self.prompt is None:
            return
        before = self.prompt.current
        new = torch.arange(before.length, now.length, device=self.prompt.ids.device)
        slots = before.length
        for layer, cut in sorted(before.cuts.items()):
            now.cuts[layer] = cut.extended(new, slots, before.length)
            slots = cut.rows.shape[1]

    def _before(self, index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            now, self._ran = self.current, index - 1
            if now is None:
                return None
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            if index in self.stages and now.visual is not None and index not in now.decided and not now.step:
                self._ask(index, now, states, kwargs)
            cut = now.cut_at(index)
            layer = compat.cache_layer(compat.cache_of(kwargs), index)
            known = ragged.columns_of(layer, now.past)
            if cut is None and known is None:
                return None
            kwargs = dict(kwargs)
            if cut is not None and cut.layer == index:
                states = cut.states(states)
            hollow = ragged.has_empty_slots(layer) or (cut is not None and cut.hollow)
            key = (
                None if cut is None else cut.layer,
                None if known is None else known.shape[1],
                index if self._cache else None,  # a cache stage leaves other columns in every layer
            )
            columns = once(
                now, ("columns", key), None, lambda _: columns_after(now, cut, known, len(states), states.device)
            )
            shift = ragged.shift_of(layer)
            move_positions(self.text, now, cut, shift, kwargs, states, key)
            width, backend = compat.fixed_length(layer), compat.backend_of(self.text)
            shorten_mask(now, cut, columns, hollow, kwargs, states, key, width=width, backend=backend)
            later = (
                shift if cut is None or not cut.compact else cut.dropped(now.length) + (0 if shift is None else shift)
            )
            now.held[index] = Held(columns, hollow, shift, later)
            if args:
                return (states, *args[1:]), kwargs
            kwargs["hidden_states"] = states
            return args, kwargs

        return hook

    def _after(self, index: int) -> Callable[..., Any]:
        last = index == len(self.text.layers) - 1

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            now, self._ran = self.current, index
            cut = now.cut_at(index) if now is not None else None
            if now is None or cut is None:
                return None
            layer = compat.cache_layer(compat.cache_of(kwargs), index)
            if layer is not None:
                held = now.held[index]
                ragged.remember(layer, held.columns, now.total, held.hollow, held.later_shift)
            if not last or not self._restore:
                return None
            if isinstance(output, tuple):
                return (cut.scatter(output[0], now.length), *output[1:])
            return cut.scatter(output, now.length)

        return hook

    def _ask(self, index: int, now: Pass, states: Tensor, kwargs: dict[str, Any]) -> None:
        """Collect the signals before layer `index`, let the method decide, note the cut."""
        if now.visual is None:
            return
        device, previous = states.device, now.cut_at(index)
        everything = torch.arange(now.length, device=device).expand(states.shape[0], -1)
        rows = everything if previous is None else previous.rows.to(device)
        marked = now.visual.to(device)
        visual = torch.gather(marked, 1, rows.clamp(min=0)) & (rows != PAD)
        positions = mask_to_rows(visual)
        numbers = (marked.cumsum(dim=1) - 1 if now.number is None else now.number).gather(1, rows.clamp(min=0))
        number = torch.where(positions == PAD, PAD, numbers.gather(1, positions.clamp(min=0)))
        signals = self._signals(index, now, states, rows, positions, number, previous, kwargs)
        reduction = self._decide(index, signals, now.samples, number)
        now.decided.add(index)  # checkpointing may run a layer and its hooks again
        now.captured.pop(index - 1, None)
        if reduction is None or (reduction.merge is None and torch.equal(reduction.counts, signals.counts)):
            return
        compact = index in self._compact
        if previous is not None and previous.compact and not compact:
            raise DartLabError(
                f"layer {previous.layer} renumbers positions, layer {index} keeps them; give both the same policy"
            )
        now.cuts[index] = make_cut(
            reduction, layer=index, rows=rows, visual=visual, positions=positions, compact=compact
        )

    def _signals(
        self,
        index: int,
        now: Pass,
        states: Tensor,
        rows: Tensor,
        positions: Tensor,
        number: Tensor,
        previous: Cut | None,
        kwargs: dict[str, Any],
    ) -> Signals:
        attended = self._real(now, previous).to(states.device)
        held = now.held.get(index - 1)

        def same_tokens(layer: int) -> Tensor | None:
            recorded = now.entered.get(layer)
            if recorded is None or recorded.shape[1] == rows.shape[1]:
                return recorded
            return gather_tokens(recorded, rows)

        def image_embeds() -> Tensor:
            return gather_tokens(now.entered[0], mask_to_rows(self.marked(now).to(now.entered[0].device)))

        def rotary() -> Any:
            own = dict(kwargs)
            move_positions(
                self.text, now, previous, None if held is None else held.shift, own, states, ("ahead", index)
            )
            return own["position_embeddings"]

        return Signals(
            visual=positions,
            attended=attended,
            grid=self.grid(now, number),
            sample_seeds=lambda: self.seeds(now),
            original=self.sizes(now, states.device),
            providers=self._marked(number)
            | self.role_providers(now, number, positions, states.shape[1])
            | ({"image_embeds": image_embeds} if 0 in now.entered else {})
            | layer_providers(
                self.text,
                now.captured[index - 1],
                layer=index,
                states=states,
                attended=attended,
                before=now.past if held is None else held.columns.shape[1] - rows.shape[1],
                embeds=lambda: same_tokens(0),
                entered=lambda: same_tokens(index - 1),
                positions=rotary,
            ),
        )

    def _marked(self, number: Tensor) -> dict[str, Callable[..., Tensor]]:
        """Marks that an earlier stage left on visual tokens, as signals: name → () → `(batch, n)` bool."""
        return {
            name: lambda mark=mark: mark.to(number.device).gather(1, number.clamp(min=0)) & (number != PAD)
            for name, mark in self._marks.items()
        }
