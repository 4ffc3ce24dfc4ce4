"""Rank anew at every decode step: nothing is dropped, the tokens that lost are masked from layer K on in this step.

This is what FastV's first release does. It saves no time and no memory; it shows what a static choice gives away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import mask_to_rows
from dart_lab.pruners.signals import Signals
from dart_lab.vlm import compat
from dart_lab.vlm.families import Family
from dart_lab.vlm.masking import visible
from dart_lab.vlm.passes import PassWatcher
from dart_lab.vlm.run import Sample
from dart_lab.vlm.tap import Captured, Tap, attention_rows

Record = Callable[[Any, "list[Sample]", Tensor, int], None]


class Reranker(PassWatcher):
    """While attached, ranks the prompt's visual tokens at every pass and masks the losers in layers ≥ K.

    `record(reduction, samples, number, step)` is called for each decision.
    """

    def __init__(
        self, model: Any, family: Family | None, visual: Tensor | None, *, pruner: Pruner, record: Record
    ) -> None:
        super().__init__(model, family, visual)
        self._pruner, self._record, self._layer = pruner, record, pruner.stage.layer
        if self._layer >= len(self.text.layers):
            raise DartLabError(f"layer={self._layer}, but the model has {len(self.text.layers)} decoder layers")
        compat.refuse_unsafe_layers(model, self._layer)
        self._tap = Tap({self._layer - 1: self.text.layers[self._layer - 1]}, self._observe)
        self._captured: Captured | None = None
        self._columns: Tensor | None = None
        self._closed: Tensor | None = None

    def attach(self) -> None:
        super().attach()
        self._undo.append(self._tap.__exit__)
        self._tap.__enter__()
        for index, block in enumerate(self.text.layers[self._layer :], start=self._layer):
            self._hook(block.register_forward_pre_hook(self._before(index), with_kwargs=True))

    def _observe(self, layer: int, captured: Captured) -> None:
        self._captured = captured

    def _before(self, index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            if index == self._layer:
                self._rank(states)
            now, closed = self.current, self._closed
            if now is None or closed is None:
                return None
            allowed = visible(states.shape[0], now.past, now.total, now.attended, closed)
            width = compat.fixed_length(compat.cache_layer(compat.cache_of(kwargs), index))
            allowed = torch.nn.functional.pad(allowed, (0, 0 if width is None else width - now.total))
            mask = compat.mask_from_allowed(allowed, compat.backend_of(self.text), states.dtype)
            return args, {**kwargs, "attention_mask": mask}

        return hook

    def _rank(self, states: Tensor) -> None:
        """Decide which visual columns are closed in this pass."""
        now, captured, prompt = self.current, self._captured, self.prompt
        self._captured = self._closed = None
        if now is None or captured is None or prompt is None:
            return
        new = now.visual
        if new is None:
            new = torch.zeros(states.shape[0], now.length, dtype=torch.bool, device=states.device)
        if now.past == 0 or self._columns is None:
            self._columns = torch.nn.functional.pad(new, (now.past, 0))
        else:
            self._columns = torch.cat([self._columns[:, : now.past], new], dim=1)
        positions = mask_to_rows(self._columns)
        attended, past = now.attended, now.past

        def rows(queries: Tensor) -> Tensor:
            if bool(((queries >= 0) & (queries < past)).any()):
                raise DartLabError(
                    f"{self._pruner.name} ranks anew by the attention of earlier tokens, whose rows a cache does not "
                    "hold; give query='last', or generate with use_cache=False"
                )
            return attention_rows(captured, queries - past, past)[..., : now.total]

        signals = Signals(
            visual=positions,
            attended=torch.ones_like(self._columns) if attended is None else attended.to(states.device),
            sample_seeds=lambda: self.seeds(prompt.current),
            providers={
                "keys": lambda: captured.key[:, :, : now.total],
                "values": lambda: captured.value[:, :, : now.total],
                "attention": rows,
            },
        )
        reduction = self._pruner(signals)
        number = torch.arange(positions.shape[1], device=positions.device).where(positions >= 0, -1)
        self._record(reduction, prompt.current.samples, number, now.total - prompt.current.total)
        kept = torch.zeros(*positions.shape[:1], positions.shape[1] + 1, dtype=torch.bool, device=positions.device)
        kept.scatter_(
            1, reduction.keep.to(kept.device).where(reduction.keep.to(kept.device) >= 0, positions.shape[1]), True
        )
        open_ = torch.zeros(self._columns.shape[0], now.total + 1, dtype=torch.bool, device=positions.device)
        open_.scatter_(1, positions.where(positions >= 0, now.total), kept[:, :-1])
        self._closed = self._columns & ~open_[:, :-1]
