"""`leave_one_out`: how much the next token's logits change without each visual token."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.vlm import compat
from dart_lab.vlm.insert import active, adapter_for
from dart_lab.vlm.locate import model_of
from dart_lab.vlm.masking import mask_drop
from dart_lab.vlm.passes import PassWatcher


class _Seen(Exception):
    """What enters the decoder is known."""


def leave_one_out(model: Any, inputs: Mapping[str, Any], *, numbers: Sequence[int] | None = None) -> list[Tensor]:
    """Largest change of a logit of the token after the prompt when one visual token is hidden from all layers.

    Positions stay as they are. The vision tower runs once, the decoder once for every token of the longest sample, the
    whole batch at a time.

    Args:
        model: a supported Hugging Face model object, or a `VLM`.
        inputs: what the processor returned.
        numbers: which visual tokens of each sample, counted within it. Default: all.

    Returns:
        For each sample `(n,)` float32, in the unit of the logits; NaN for tokens that are not among `numbers`.

    Raises:
        DartLabError: no visual tokens in the inputs, or a number that no sample has.

    Warns of half precision, in which rounding alone changes logits by several hundredths.

    >>> import dart_lab as dl
    >>> vlm, sample = dl.load("tiny"), dl.load_task("shapes", n=1, seed=0)[0]
    >>> found = leave_one_out(vlm, vlm.prepare([sample.image], [sample.question]), numbers=[0, 300])[0]
    >>> len(found), int((found >= 0).sum())
    (576, 2)
    """
    model = model_of(model)
    text, head = compat.text_model(model), model.get_output_embeddings()
    args, kwargs, visual, attended = _entering(model, inputs)
    batch, length = visual.shape
    column = torch.arange(length, device=visual.device)
    last = column.expand(batch, -1).masked_fill(~attended, -1).amax(dim=1)

    def logits(hidden: Tensor) -> Tensor:
        with mask_drop(model, hidden, layer=0), torch.no_grad():
            states = text(*args, **kwargs).last_hidden_state
            found: Tensor = head(states[torch.arange(batch, device=states.device), last.to(states.device)])
        return found.float()

    dtype = next(text.parameters()).dtype
    if torch.finfo(dtype).bits < torch.finfo(torch.float32).bits:
        warnings.warn(
            f"the model runs in {dtype}: rounding alone changes logits by hundredths, so small "
            "effects cannot be told; load it in float32", DartLabWarning, stacklevel=2,
        )  # fmt: skip
    whole = logits(torch.zeros_like(visual))
    order, counts = visual.cumsum(dim=1) - 1, visual.sum(dim=1).tolist()
    effect = torch.full((batch, max(counts)), float("nan"), device=whole.device)
    for number in range(max(counts)) if numbers is None else numbers:
        if not 0 <= number < max(counts):
            raise DartLabError(f"visual token {number}: the samples have tokens 0 to {max(counts) - 1}")
        effect[:, number] = (logits(visual & (order == number)) - whole).abs().amax(dim=1)
    return [own[:count] for own, count in zip(effect, counts, strict=True)]


def _entering(model: Any, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    """What the decoder is called with, and `(batch, sequence)` bool twice: visual tokens, real tokens."""
    watcher = PassWatcher(model, adapter_for(model, None), None)
    seen: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(args=args, kwargs=kwargs)

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Seen

    text = compat.text_model(model)
    handles = [text.register_forward_pre_hook(note, with_kwargs=True),
               text.layers[0].register_forward_pre_hook(stop, with_kwargs=True)]  # fmt: skip
    try:
        with active(model, watcher), torch.no_grad():
            with suppress(_Seen):
                model(**{**inputs, "use_cache": False})
            now = watcher.current
    finally:
        for handle in handles:
            handle.remove()
    if now is None or now.visual is None:
        raise DartLabError("the inputs have no visual tokens (a text-only prompt?)")
    attended = torch.ones_like(now.visual) if now.attended is None else now.attended.bool()
    return seen["args"], seen["kwargs"], now.visual, attended
