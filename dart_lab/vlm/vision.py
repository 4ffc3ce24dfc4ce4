"""Reductions before the language model: inside the vision tower, on its features, or after the projector.

What a method decides about a crop is written into the full-length features at the places of the tokens that represent
the slots; the other places are dropped in front of the language model (`front.py`), where they are placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import PAD, Merge, Reduction, compose, rows_to_mask
from dart_lab.pruners.selectors import ascending
from dart_lab.pruners.signals import Signals
from dart_lab.vlm import compat
from dart_lab.vlm.families.tiles import folded, tokens_of_tile
from dart_lab.vlm.providers import received
from dart_lab.vlm.tap import Captured, Tap, attention_logits, attention_rows
from dart_lab.vlm.tower_memo import memo_of

CLASS_TOKEN_PLACE = "class_token_place"  # note: which patch's place a kept class token takes; -1: it does not go on
KINDS = ("VIT_BLOCK", "VISION_OUT", "PROJECTED")


class VisionReducer:
    """Hooks on the vision tower and the projector that apply reductions to every crop.

    Args:
        model: a model with a vision tower and a projector; of CLIP's or DINOv2's build to reduce before the projector.
        parts: the single-stage methods that act there, in the order of their stages.
        decide: part, signals → reduction (None: leave as it is).
        regions: which part of each picture each row of the tower's input shows, see `Family.regions`.

    `placed` is what all parts did together, for each crop, in indices of the tokens that go on to the language model;
    None where nothing was reduced since the tower last ran.
    """

    def __init__(
        self,
        model: Any,
        parts: Sequence[Pruner],
        decide: Callable[[Pruner, Signals], Reduction | None],
        regions: Callable[[], list[np.ndarray] | None] = lambda: None,
    ) -> None:
        tower = compat.vision_tower(model)
        if tower is None:
            raise DartLabError(f"{type(model).__name__} has no vision tower; reduce inside the language model instead")
        if len(compat.vision_towers(model)) > 1:
            raise DartLabError(
                f"{type(model).__name__} has one vision tower for pictures and one for videos, which are not reduced "
                "apart; use a method that acts before or inside the language model (stage LLM_IN or a decoder layer)"
            )
        self.tower, self.projector, self.blocks = tower, compat.projector(model), compat.vision_blocks(tower)
        self.parts, self._decide, self._regions = list(parts), decide, regions
        self._early = any(part.stage.kind != "PROJECTED" for part in parts)
        fold = folded(model.config)
        self.feature_block = _feature_block(model, len(self.blocks), fold) if self._early else len(self.blocks) - 1
        self.has_cls = hasattr(model.config, "vision_feature_select_strategy") and (
            fold == 1 and "siglip" not in model.config.vision_config.model_type
        )
        self.drops_cls = self.has_cls and model.config.vision_feature_select_strategy == "default"
        self.places = tokens_of_tile(model.config) + (self.has_cls and not self.drops_cls)
        self.placed: Reduction | None = None
        self._reduction: Reduction | None = None
        self._cls_goes_on = False
        self._captured: dict[int, Captured] = {}
        self._sizes: Tensor | None = None
        self._valid: Tensor | None = None
        self._features: Tensor | None = None
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Hang the hooks in."""
        inside = {part.stage.layer: part for part in self.parts if part.stage.kind == "VIT_BLOCK"}
        beyond = [layer for layer in inside if layer > self.feature_block]
        if beyond:
            raise DartLabError(
                f"vision block {beyond[0]} comes after block {self.feature_block}, which makes the features: no "
                "effect; give the method's blocks= or layers= within the tower"
            )
        self._undo.append(self.tower.register_forward_pre_hook(self._start).remove)
        self._undo.append(self.projector.register_forward_hook(self._after_projector).remove)
        if not self._early:
            return
        watched = {self.feature_block, *inside, *_early_blocks(self.parts)}
        memo = memo_of(self.tower)
        if memo is not None:
            self._undo.append(memo.pause() if inside else memo.watch(watched, self._recall))
        tap = Tap({index: self.blocks[index] for index in sorted(watched)}, self._observe)
        self._undo.append(tap.__exit__)
        tap.__enter__()
        feature = self.blocks[self.feature_block]
        self._undo.append(feature.register_forward_hook(self._note_features).remove)
        for index in range(min(inside, default=len(self.blocks)), len(self.blocks)):
            self._replace_forward(index, inside.get(index))
        self._undo.append(self.projector.register_forward_pre_hook(self._before_projector).remove)

    def detach(self) -> None:
        """Take every hook out again."""
        while self._undo:
            self._undo.pop()()

    def _start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._reduction = self.placed = self._sizes = self._valid = self._features = None
        self._cls_goes_on = False
        self._captured.clear()

    def _observe(self, block: int, captured: Captured) -> None:
        self._captured[block] = captured

    def _note_features(self, module: nn.Module, args: Any, output: Any) -> None:
        self._features = output[0] if isinstance(output, tuple) else output

    def _recall(self, block: int, captured: Captured, output: Any) -> None:
        """What a block received and gave when the tower ran for another method."""
        self._observe(block, captured)
        if block == self.feature_block:
            self._note_features(self.blocks[block], (), output)

    def _replace_forward(self, index: int, part: Pruner | None) -> None:
        """Give a block a forward that reduces between attention and MLP, where no hook reaches."""
        block: Any = self.blocks[index]
        as_tuple = compat.returns_tuple(block)

        def forward(hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            bias = self._bias(hidden_states, attention_mask)
            for name in ("output_attentions", "causal_attention_mask"):
                kwargs.pop(name, None)
            states = hidden_states + compat.attended(block, hidden_states, bias, **kwargs)
            if part is not None:
                states = self._reduce_block(index, part, states)
            states = states + compat.transformed(block, states)
            return (states,) if as_tuple else states

        block.forward = forward
        self._undo.append(lambda: vars(block).pop("forward", None))

    def _bias(self, states: Tensor, given: Tensor | None) -> Tensor | None:
        """What a block adds to its logits, `(crops, 1, tokens, tokens)`: log size of every key, if attention is
        proportional; empty slots of crops that keep fewer are closed. None before anything was merged.
        """
        bias = None
        if self._sizes is not None and self.parts[0].proportional:
            bias = self._sizes.clamp(min=1).log().to(states.dtype)
        if self._valid is not None:
            bias = torch.zeros_like(states[:, :, 0]) if bias is None else bias
            bias = bias.masked_fill(~self._valid, torch.finfo(states.dtype).min)
        return given if bias is None else bias[:, None, None, :].expand(-1, 1, states.shape[1], -1)

    def _reduce_block(self, index: int, part: Pruner, states: Tensor) -> Tensor:
        sizes = self._sizes if self._sizes is not None else torch.ones(states.shape[:2], device=states.device)
        extra = {"sizes": lambda: sizes}
        reduction = self._decide(part, self._signals(index, states, with_cls=True, extra=extra))
        if reduction is None:
            return states
        self._sizes = reduction.slot_sizes(sizes)
        filled = reduction.sequence != PAD
        self._valid = None if bool(filled.all()) else filled
        self._take(reduction)
        return reduction.apply(states)

    def _take(self, reduction: Reduction) -> None:
        self._reduction = reduction if self._reduction is None else compose(reduction, self._reduction)

    def _signals(
        self, block: int, states: Tensor, *, with_cls: bool, extra: Mapping[str, Callable[..., Tensor]] | None = None
    ) -> Signals:
        """Signals of one vision block; `with_cls`: the class token counts among the tokens to choose from."""
        crops, length = states.shape[:2]
        captured = self._captured[block]
        attended = torch.ones(crops, length, dtype=torch.bool, device=states.device)
        if self._valid is not None:
            attended = self._valid
        first = 1 if self.has_cls and not with_cls else 0
        providers: dict[str, Callable[..., Tensor]] = {
            "hidden": lambda: states,
            "keys": lambda: captured.key,
            "values": lambda: captured.value,
            "attention": lambda queries: attention_rows(captured, queries, 0),
            "attention_logits": lambda queries: attention_logits(captured, queries),
            "received": lambda: received(captured, attended, 0),
            **{f"attention@{early}": self._rows_of(early) for early in _early_blocks(self.parts)},
            **(extra or {}),
        }
        cls = torch.zeros(crops, dtype=torch.int64, device=states.device) if self.has_cls else None
        image, region = self._views(crops, states.device)
        return Signals(
            visual=torch.arange(first, length, device=states.device).expand(crops, -1).where(attended[:, first:], PAD),
            attended=attended,
            cls=cls,
            grid=self._grid_now(crops, first, states.device),
            image=image,
            region=region,
            providers=providers,
            original=torch.full((crops,), self.places + self.drops_cls - first, device=states.device),
        )

    def _views(self, crops: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Picture `(crops,)` and region `(crops, 4)` of every crop; None where each is a whole picture."""
        known = self._regions()
        if known is None or crops % max(sum(map(len, known)), 1):  # a video, whose frames are whole pictures
            return None, None
        repeat = crops // max(sum(map(len, known)), 1)  # beams encode a picture once each
        regions = [own for own in known for _ in range(repeat)]
        image = torch.repeat_interleave(torch.arange(len(regions)), torch.tensor([len(own) for own in regions]))
        return image.to(device), torch.from_numpy(np.concatenate(regions)).float().to(device)

    def _rows_of(self, block: int) -> Callable[[Tensor], Tensor]:
        return lambda queries: attention_rows(self._captured[block], queries, 0)

    def _grid_now(self, crops: int, first: int, device: torch.device) -> Tensor | None:
        """The same of the tokens that are left, those before `first` left out."""
        whole = self._grid(crops, self.places + self.drops_cls, 0, device)
        if whole is None or self._reduction is None:
            return None if whole is None else whole[:, first:]
        left = self._reduction.sequence
        return whole.gather(1, left.clamp(min=0)[:, :, None].expand(-1, -1, 4)).masked_fill(
            left[:, :, None] == PAD, PAD
        )[:, first:]

    def _grid(self, crops: int, length: int, first: int, device: torch.device) -> Tensor | None:
        """Crop, row and column of every token of an unreduced square tower."""
        patches = length - self.has_cls
        side = int(patches**0.5)
        if side * side != patches:
            return None
        cell = torch.arange(patches, device=device)
        grid = torch.stack([torch.zeros_like(cell), torch.zeros_like(cell), cell // side, cell % side], dim=1)
        if self.has_cls and not first:
            grid = torch.cat([torch.tensor([[0, 0, -1, -1]], device=device), grid])
        return grid.expand(crops, -1, -1)

    def _before_projector(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        features: Tensor = args[0]
        for part in self._at("VISION_OUT"):
            if self._features is None:
                continue
            with_cls = part.keeps_cls
            reduction = self._decide(part, self._signals(self.feature_block, self._features, with_cls=with_cls))
            if reduction is not None:
                if self._reduction is not None and not with_cls:  # from here on without the class token
                    self._reduction = self._place(self._reduction, False)
                self._take(reduction)
                self._cls_goes_on = with_cls and self.has_cls
                features = reduction.apply(self._features if self._cls_goes_on else features)
        return None if self._reduction is None else (self._spread(features), *args[1:])

    def _after_projector(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        if self._reduction is not None or not self._at("PROJECTED"):
            return None
        crops, length = output.shape[:2]
        signals = Signals(
            visual=torch.arange(length, device=output.device).expand(crops, -1),
            attended=torch.ones(crops, length, dtype=torch.bool, device=output.device),
            grid=self._grid(crops, length + self.drops_cls, int(self.drops_cls), output.device),
            providers={"hidden": lambda: output},
        )
        decisions = [self._decide(part, signals) for part in self._at("PROJECTED")]
        reduction = next((decision for decision in decisions if decision is not None), None)
        if reduction is None:
            return None
        self._take(reduction)
        return self._spread(reduction.apply(output))

    def _at(self, kind: str) -> list[Pruner]:
        return [part for part in self.parts if part.stage.kind == kind]

    def _spread(self, slots: Tensor) -> Tensor:
        """Put slots `(crops, m, channels)` at the places of their tokens: `(crops, n, channels)`, 0 elsewhere."""
        if self._reduction is None:
            return slots
        self.placed = placed = self._place(self._reduction, self._cls_goes_on)
        out = slots.new_zeros(slots.shape[0], self.places + 1, slots.shape[2])
        index = placed.sequence.where(placed.sequence != PAD, self.places)[:, :, None].expand(-1, -1, slots.shape[2])
        return out.scatter(1, index, slots[:, : index.shape[1]])[:, : self.places]

    def place(self, reduction: Reduction, part: Pruner) -> Reduction:
        """What `part` alone decided, in indices of the tokens that go on to the language model."""
        return self._place(reduction, part.stage.kind == "VISION_OUT" and self.has_cls and bool(part.keeps_cls))

    def _place(self, reduction: Reduction, cls_goes_on: bool) -> Reduction:
        """Translate the tower's indices into those of the tokens that go on, which lack the class token."""
        if not self.drops_cls or int(reduction.size[0]) == self.places:
            return reduction
        if cls_goes_on:
            free = ~rows_to_mask(reduction.keep, self.places + 1)[:, 1:]
            if bool((~free.any(dim=1)).any()):
                raise DartLabError(
                    "every patch is kept and the class token too, for which there is no place left; keep fewer"
                )
            host = free.long().argmax(
                dim=1, keepdim=True
            )  # the class token takes the place of the first patch that went
        elif bool((reduction.sequence[:, 0] != 0).any()):
            raise DartLabError(
                "a method moved or dropped the class token inside the tower; it must stay the first token"
            )
        else:
            host = torch.full_like(reduction.keep[:, :1], PAD)
        first = 0 if cls_goes_on else 1

        def moved(index: Tensor) -> Tensor:
            return torch.where(index == 0, host, index - 1).masked_fill(index == PAD, PAD)

        sequence = moved(reduction.sequence)[:, first:]
        order = None if reduction.order is None else moved(reduction.order)
        return Reduction(
            keep=ascending(sequence),
            size=reduction.size - 1,
            asked=torch.where(reduction.asked > 0, reduction.asked - first, reduction.asked),
            slots=sequence,
            order=order,
            score=None if reduction.score is None else reduction.score[:, 1:],
            merge=None if reduction.merge is None else Merge.from_dense(reduction.weights()[:, first:, 1:]),
            notes={**reduction.notes, CLASS_TOKEN_PLACE: host},
        )


def watched_blocks(model: Any, parts: Sequence[Pruner]) -> set[int]:
    """Blocks of the vision tower that methods on its features look at; none in a model whose tower is not reduced."""
    early = [part for part in parts if part.stage.kind == "VISION_OUT"]
    if not early:
        return set()
    try:
        reducer = VisionReducer(model, early, lambda part, signals: None)
    except DartLabError:  # each method says so in its turn
        return set()
    return {reducer.feature_block, *_early_blocks(early)} & set(range(len(reducer.blocks)))


def _early_blocks(parts: Sequence[Pruner]) -> set[int]:
    """Blocks whose attention methods ask for by number: `attention@L`."""
    names = {need for part in parts for need in part.needs if need.startswith("attention@")}
    return {int(name.removeprefix("attention@")) for name in names}


def _feature_block(model: Any, blocks: int, fold: int) -> int:
    """The block that makes the features. Raises `DartLabError` where single patches cannot be reduced before the
    projector.
    """
    if fold > 1:
        raise DartLabError(
            f"{type(model).__name__} folds {fold} × {fold} patches into one token behind the vision tower, so no patch "
            "can go there alone; use a method with where='PROJECTED', or one that acts before or inside the language "
            "model (stage LLM_IN or a decoder layer)"
        )
    feature = getattr(model.config, "vision_feature_layer", None)
    if feature is None:
        raise DartLabError(
            f"the vision tower of {type(model).__name__} is not of CLIP's build, so nothing can be reduced in it; "
            "use a method with where='PROJECTED', or one that acts before or inside the language model (stage "
            "LLM_IN or a decoder layer)"
        )
    if not isinstance(feature, int):
        raise DartLabError(
            "features from several vision layers cannot be reduced; use a method inside the language model"
        )
    return blocks + feature if feature < 0 else feature - 1
