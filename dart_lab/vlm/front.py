"""Drop visual tokens in front of the language model: after the vision tower, the projector, or from the packed prompt.

The text model gets the shorter prompt and builds its own masks for it; the KV cache is uniformly short. Later passes of
the same conversation are told the positions of the full prompt, or renumbered ones, as the method asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import PAD, Reduction, compose, mask_to_rows
from dart_lab.pruners.signals import Signals
from dart_lab.vlm import compat, ragged
from dart_lab.vlm.arguments import renumbered, renumbers
from dart_lab.vlm.crops import Packing, join_crops, packing
from dart_lab.vlm.cuts import Cut, gather_along, make_cut
from dart_lab.vlm.deepstack import shorten_features
from dart_lab.vlm.dropping import Dropper
from dart_lab.vlm.passes import Held, Pass
from dart_lab.vlm.run import Sample
from dart_lab.vlm.vision import KINDS, VisionReducer

FRONT_KINDS = (*KINDS, "LLM_IN")
Note = Callable[[Pruner, Reduction, "list[Sample]", Tensor], None]


class FrontDropper(Dropper):
    """A `Dropper` that also acts before decoder layer 0.

    Args:
        front: single-stage methods at `VIT_BLOCK`, `VISION_OUT`, `PROJECTED` or `LLM_IN`.
        note: called once a prompt for every decision: method, reduction in the sample's visual tokens, samples, and
            `number` `(batch, n)`, which visual token each of them is.
        apply: False asks the methods and changes nothing.
        before_layers: called when the front is done and layer 0 is about to run.
    """

    def __init__(
        self,
        model: Any,
        family: Any,
        visual: Tensor | None,
        *,
        front: Sequence[Pruner],
        note: Note,
        apply: bool = True,
        before_layers: Callable[[], None] | None = None,
        **layers: Any,
    ) -> None:
        super().__init__(model, family, visual, **layers)
        self._input_parts = [part for part in front if part.stage.kind == "LLM_IN"]
        on_vision = [part for part in front if part.stage.kind in KINDS]
        self._note, self._apply, self._before_layers = note, apply, before_layers
        self._compact_front = any(renumbers(model, part) for part in front)
        self._asked: list[tuple[Pruner, Reduction]] = []
        self._vision = VisionReducer(model, on_vision, self._ask_vision, self._regions) if on_vision else None
        self._cut: Cut | None = None
        self._prompt_length = 0
        self._prompt_attended: Tensor | None = None
        self._full: Pass | None = None

    def attach(self) -> None:
        super().attach()
        if self._vision is not None:
            self._undo.append(self._vision.detach)
            self._vision.attach()
        self._hook(self.text.register_forward_hook(self._finish, with_kwargs=True))

    def _regions(self) -> list[np.ndarray] | None:
        """For each picture, the part of it that each row of the tower's input shows; None: the whole of it."""
        return None if self.family is None else self.family.regions(self.model, self._prompt_inputs | self._inputs)

    def _ask_vision(self, part: Pruner, signals: Signals) -> Reduction | None:
        reduction = part(signals)
        self._asked.append((part, reduction))
        return reduction if self._apply else None

    def past(self, kwargs: dict[str, Any]) -> int:
        """Columns of the full prompt that came before, also where layer 0 holds fewer."""
        layer: Any = compat.cache_layer(compat.cache_of(kwargs), 0)
        columns: Tensor | None = getattr(layer, "kept_columns", None)
        if columns is None or isinstance(kwargs.get("cache_position"), Tensor):
            return super().past(kwargs)
        return int(layer.kept_total) + int(layer.get_seq_length()) - int(columns.shape[1])

    def attended(self, kwargs: dict[str, Any], total: int) -> Tensor | None:
        """As for any pass; a ready-made mask for a shortened cache counts other columns: recall the padding."""
        mask, layer = compat.opened(kwargs.get("attention_mask")), compat.cache_layer(compat.cache_of(kwargs), 0)
        if not isinstance(mask, Tensor) or mask.dim() != 4 or getattr(layer, "kept_columns", None) is None:
            return super().attended(kwargs, total)
        real = self._prompt_attended
        return None if real is None else torch.nn.functional.pad(real, (0, total - real.shape[1]), value=True)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        super()._begin(module, args, kwargs)
        full, self._full = self.current, None
        if full is None:
            return None
        kwargs = dict(kwargs)
        ids = kwargs.pop("input_ids", args[0] if args else None)
        if kwargs.get("inputs_embeds") is None:
            kwargs["inputs_embeds"] = self.text.embed_tokens(ids)
        embeds: Tensor = kwargs["inputs_embeds"]
        cut: Cut | None = None
        if full.visual is not None:
            if not full.step:
                self._cut, self._prompt_length = self._decide_front(full, embeds), full.length
                self._prompt_attended = full.attended
            elif self._cut is not None:
                new = torch.arange(self._prompt_length, full.length, device=embeds.device)
                cut = self._cut.extended(new, self._prompt_length, self._prompt_length)
            cut = cut if full.step else self._cut
        layer = compat.cache_layer(compat.cache_of(kwargs), 0)
        known = ragged.columns_of(layer, full.past)
        if self._before_layers is not None:
            self._before_layers()
        if cut is None and known is None:
            return None
        self._shorten_inputs(full, cut, known, layer, kwargs)
        return (), kwargs

    def _decide_front(self, full: Pass, embeds: Tensor) -> Cut | None:
        """Ask what has not been asked yet, note the decisions, and say how the prompt is cut."""
        if full.visual is None:
            return None
        rows = torch.arange(full.length, device=embeds.device).expand(len(embeds), -1)
        visual = full.visual.to(embeds.device)
        positions = mask_to_rows(visual)
        number = (
            torch.arange(positions.shape[1], device=embeds.device).expand(len(embeds), -1).where(positions != PAD, PAD)
        )
        first = self._decided_by_vision(full, number)

        def cut(reduction: Reduction) -> Cut:
            return make_cut(
                reduction, layer=0, rows=rows, visual=visual, positions=positions, compact=self._compact_front
            )

        before = None if first is None else cut(first)
        reduction = first
        for part in self._input_parts:
            states, marked, real = embeds, visual, torch.ones_like(visual)
            if full.attended is not None:
                real = full.attended.to(embeds.device)[:, full.past :]
            if before is not None and first is not None:
                states = before.states(embeds)
                marked = visual.gather(1, before.rows.clamp(min=0)) & (before.rows != PAD)
                real = real.gather(1, before.rows.clamp(min=0)) & (before.rows != PAD)
                number = first.sequence
            places = mask_to_rows(marked)
            second = part(
                Signals(
                    visual=places,
                    attended=real,
                    original=full.visual.sum(dim=1).to(embeds.device),
                    grid=self.grid(full, number),
                    sample_seeds=lambda: self.seeds(full),
                    providers={
                        "hidden": lambda states=states: states,
                        "embeds": lambda states=states: states,
                        **self.role_providers(full, number, places, marked.shape[1]),
                    },
                )
            )
            self._note(part, second, full.samples, number)
            if self._apply:
                reduction = second if first is None else compose(second, first)
        whole = reduction is None or (reduction.merge is None and torch.equal(reduction.counts, reduction.size))
        return None if whole or reduction is None else cut(reduction)

    def _decided_by_vision(self, full: Pass, number: Tensor) -> Reduction | None:
        """What the vision side decided, crop by crop, as one reduction of each sample's visual tokens."""
        if self._vision is None:
            return None
        asked, self._asked = self._asked, []
        if not asked:
            raise DartLabError(
                "the picture was encoded outside this block, so its features could not be reduced; encode it inside"
            )
        if not self._apply:
            for part, reduction in asked:
                self._note(part, self._of_samples(self._vision.place(reduction, part), full), full.samples, number)
            return None
        if self._vision.placed is None:
            return None
        whole = self._of_samples(self._vision.placed, full)
        self._note(asked[-1][0], whole, full.samples, number)
        self._marks = marks(whole, number)
        return replace(whole, merge=None)  # merged features are in their places already

    def _of_samples(self, crops: Reduction, full: Pass) -> Reduction:
        """Join the crops of every sample: `(crops, …)` → `(batch, …)`, in the sample's own numbering."""
        pictures = sum(sample.images for sample in full.samples)
        rows = full.picture_rows
        if len(rows) != pictures or (rows and len(crops.keep) % sum(map(len, rows))):
            raise DartLabError(
                f"{len(crops.keep)} encoded pictures do not belong to the {pictures} pictures of the prompts "
                "(pictures and videos together are encoded in two parts); use a method that acts before or inside the "
                "language model (stage LLM_IN or a decoder layer)"
            )
        packings: list[Packing] = []
        first = 0
        for sample in full.samples:
            own = rows[first : first + sample.images]
            packings += [packing(sample.tokens, own, int(crops.size[0]), crops.keep.device)] * full.expand
            first += sample.images
        return join_crops(crops, packings)

    def continue_prompt(self, now: Pass) -> None:
        """Left to `_shorten_inputs`, which knows the short pass."""

    def _shorten_inputs(
        self, full: Pass, cut: Cut | None, known: Tensor | None, layer: Any, kwargs: dict[str, Any]
    ) -> None:
        """Rewrite the text model's keyword arguments, and the current pass, to the tokens that are left."""
        embeds: Tensor = kwargs["inputs_embeds"]
        batch, device = len(embeds), embeds.device
        before = torch.arange(full.past, device=device).expand(batch, -1) if known is None else known.to(device)
        rows = torch.arange(full.length, device=device).expand(batch, -1) if cut is None else cut.rows.to(device)
        columns = torch.cat([before, torch.where(rows == PAD, PAD, rows + full.past)], dim=1)
        shift, hollow = ragged.shift_of(layer), ragged.has_empty_slots(layer) or (cut is not None and cut.hollow)
        kwargs["inputs_embeds"] = embeds if cut is None else cut.states(embeds)
        if cut is not None:
            shorten_features(kwargs, cut)
        kwargs["position_ids"] = self._positions(full, cut, shift, kwargs.get("position_ids"), device)
        mask = kwargs.get("attention_mask")
        if mask is None:  # gaps in the positions would be taken for packed sequences if no mask said otherwise
            mask = torch.ones(batch, full.total, dtype=torch.int64, device=device)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            mask = mask[:, : full.total].gather(1, columns.clamp(min=0)).masked_fill(columns == PAD, 0)
        elif isinstance(compat.opened(mask), Tensor):
            mask = ragged.new_mask(
                rows,
                columns,
                cut is None or cut.ordered,
                full.past,
                full.attended,
                compat.fixed_length(layer),
                compat.backend_of(self.text),
                embeds.dtype,
            )
        kwargs["attention_mask"] = mask
        slots = before.shape[1]
        if kwargs.get("cache_position") is not None:
            kwargs["cache_position"] = torch.arange(slots, columns.shape[1], device=device)
        later = shift if cut is None or not cut.compact else cut.dropped(full.length) + (0 if shift is None else shift)
        self._full, self._held_front = full, (cut, Held(columns, hollow, shift, later))
        self.current = short = self._short_pass(full, rows, slots, columns)
        if full.step:
            super().continue_prompt(short)
        elif full.past == 0 and self.prompt is not None and full.visual is not None:
            self.prompt.current = short

    def _short_pass(self, full: Pass, rows: Tensor, slots: int, columns: Tensor) -> Pass:
        visual = number = attended = None
        if full.visual is not None:
            marked = full.visual.to(rows.device)
            visual = marked.gather(1, rows.clamp(min=0)) & (rows != PAD)
            number = (marked.cumsum(dim=1) - 1).gather(1, rows.clamp(min=0))
        if full.attended is not None or bool((columns == PAD).any()):
            attended = columns != PAD
            if full.attended is not None:
                attended &= full.attended.to(rows.device).gather(1, columns.clamp(min=0))
        return Pass(
            slots,
            rows.shape[1],
            visual,
            attended,
            expand=full.expand,
            samples=full.samples,
            layout=full.layout,
            step=full.step,
            number=number,
        )

    def _positions(
        self, full: Pass, cut: Cut | None, shift: Tensor | None, given: Tensor | None, device: torch.device
    ) -> Tensor:
        """Rotary positions of the tokens that are left: those of the full prompt, or renumbered without gaps."""
        ids = torch.arange(full.past, full.total, device=device)[None] if given is None else given
        if cut is not None and not cut.compact:
            return gather_along(ids, cut.rows.to(device), dim=-1)
        return renumbered(ids, cut, shift)

    def _finish(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Note on the cache which columns it holds, and give the output its full length again."""
        if self._full is None:
            return None
        (cut, held), full = self._held_front, self._full
        cache = compat.cache_of(kwargs) or compat.cache_of(dict(output) if isinstance(output, dict) else {})
        layer = compat.cache_layer(cache, 0)
        if layer is not None:
            ragged.remember(layer, held.columns, full.total, held.hollow, held.later_shift)
        if cut is None:
            return None
        if isinstance(output, tuple):
            return (cut.scatter(output[0], full.length), *output[1:])
        output["last_hidden_state"] = cut.scatter(output["last_hidden_state"], full.length)
        return output


def marks(reduction: Reduction, number: Tensor) -> dict[str, Tensor]:
    """Notes that mark slots, `(batch, slots)` bool, as marks on the sample's visual tokens `(batch, n)` bool."""
    out = {}
    for name, note in reduction.notes.items():
        if note.dtype == torch.bool and note.shape == reduction.sequence.shape:
            mark = torch.zeros(len(number), number.shape[1] + 1, dtype=torch.bool, device=number.device)
            place = reduction.sequence.where((reduction.sequence != PAD) & note, number.shape[1])
            out[name] = mark.scatter(1, place.to(number.device), True)[:, :-1]
    return out
