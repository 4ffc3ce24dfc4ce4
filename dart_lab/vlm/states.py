"""`visual_states`: what the visual tokens of a batch look like on their way through an unpruned model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError, check_whole
from dart_lab.pruners.reduction import PAD
from dart_lab.vlm import compat
from dart_lab.vlm.insert import active, adapter_for
from dart_lab.vlm.layout import VisualTokens
from dart_lab.vlm.locate import model_of
from dart_lab.vlm.passes import PassWatcher
from dart_lab.vlm.providers import received_by_head
from dart_lab.vlm.tap import Captured, Tap, attention_rows
from dart_lab.vlm.tower_columns import TowerColumns


@dataclass(frozen=True, eq=False, kw_only=True)
class VisualStates:
    """One sample's visual tokens.

    Attributes:
        tokens: where they lie.
        vision: `(n, vision channels)` what the projector receives; None where the model merges or rearranges patches
            after its tower, so that features and tokens are not one to one.
        embeds: `(n, channels)` what enters decoder layer 0.
        layers: decoder layer → `(n, channels)` its input.
        first: decoder layer → `(channels,)` its input at the prompt's first token; empty where that is a visual one.
        attention: decoder layer → `(n,)` float32 weight that each token gets from the text behind the last picture,
            mean over heads and text tokens, as shares of what the visual tokens get; empty: not asked for.
        received: decoder layer → `(heads, n)` float32 weight that each token gets from a query that sees it, mean over
            these; empty: not asked for.
        column_sums: `(n,)` float32 attention that each token's patch gets in the tower's block that makes the features,
            summed over all queries, mean over heads; None: not asked for, or not one patch a token.
        effect: `(n,)` float32, see `dart_lab.vlm.leave_one_out`; None: not asked for.
    """

    tokens: VisualTokens
    vision: Tensor | None
    embeds: Tensor
    layers: dict[int, Tensor]
    first: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    column_sums: Tensor | None = None
    effect: Tensor | None = None


class _Enough(Exception):
    """Every state that was asked for is there."""


def visual_states(
    model: Any,
    inputs: Mapping[str, Any],
    layers: Sequence[int] = (),
    *,
    attention: bool = False,
    received: bool = False,
    column_sums: bool = False,
    visual: Tensor | None = None,
) -> list[VisualStates]:
    """States of every visual token, from one unpruned run that stops at the deepest layer asked for.

    Args:
        model: a supported Hugging Face model object, or a `VLM`.
        inputs: what the processor returned.
        layers: decoder layers whose inputs are wanted, besides that of layer 0.
        attention: also the attention that the visual tokens get from text in these layers; then the whole model runs.
        received: also the attention that they get from all that see them, likewise.
        column_sums: also the attention that they get inside the vision tower.
        visual: as in `prune`.

    Returns:
        One entry a sample.

    Raises:
        DartLabError: no visual tokens in the inputs, a layer that does not exist, or attention is asked for and no text
            stands behind a picture.

    >>> import dart_lab as dl
    >>> vlm, sample = dl.load("tiny"), dl.load_task("shapes", n=1, seed=0)[0]
    >>> found = visual_states(vlm, vlm.prepare([sample.image], [sample.question]), [2])[0]
    >>> found.embeds.shape == found.layers[2].shape, len(found.tokens)
    (True, 576)
    """
    model = model_of(model)
    text = compat.text_model(model)
    depth, wanted = len(text.layers), sorted({0, *layers})
    for layer in wanted:
        check_whole("a layer", layer)
    if wanted[0] < 0 or wanted[-1] >= depth:
        raise DartLabError(f"layers={list(layers)}: {type(model).__name__} has decoder layers 0 to {depth - 1}")
    watcher = PassWatcher(model, adapter_for(model, visual), visual)
    entered: dict[int, Tensor] = {}
    features: list[Tensor] = []
    watched = attention or received
    last = depth if watched else wanted[-1]
    from_text: dict[int, list[Tensor]] = {}
    from_all: dict[int, list[Tensor]] = {}

    def look(layer: int, captured: Captured) -> None:
        if watcher.current is None or watcher.current.visual is None:
            return
        visual, attended = watcher.current.visual, watcher.current.attended
        if attention:
            from_text[layer] = _received(captured, visual, attended)
        if received:
            real = torch.ones_like(visual) if attended is None else attended.bool()
            heads = received_by_head(captured, real.to(captured.key.device))
            from_all[layer] = [one[:, mask] for one, mask in zip(heads, visual.to(heads.device), strict=True)]

    tap = Tap({layer: text.layers[layer] for layer in layers}, look) if watched else nullcontext()
    tower = TowerColumns(model) if column_sums else None
    try:
        join = compat.projector(model)
    except DartLabError:
        join = None
    handles = [text.layers[layer].register_forward_pre_hook(_note(entered, layer, last), with_kwargs=True)
               for layer in wanted]  # fmt: skip
    if join is not None:
        handles.append(join.register_forward_pre_hook(lambda module, args: features.append(args[0].detach())))
    try:
        with active(model, watcher), tap, tower or nullcontext(), torch.no_grad():
            with suppress(_Enough):
                model(**{**inputs, "use_cache": False})
            now = watcher.current
    finally:
        for handle in handles:
            handle.remove()
    if now is None or now.visual is None:
        raise DartLabError("the inputs have no visual tokens (a text-only prompt?)")
    counts = now.visual.sum(dim=1).tolist()
    patches = all(sample.tokens.patch is None for sample in now.samples)  # and no newlines, nothing blended
    vision = _one_to_one(features, counts) if patches else None
    columns = None if tower is None or vision is None else tower.sums(counts)
    out = []
    for row, sample in enumerate(now.samples):
        mask = now.visual[row]
        start = 0 if now.attended is None else int(now.attended[row].int().argmax())
        states = {layer: entered[layer][row][mask.to(entered[layer].device)] for layer in wanted}
        out.append(
            VisualStates(
                tokens=sample.tokens,
                vision=None if vision is None else vision[row],
                embeds=states[0],
                layers={layer: states[layer] for layer in layers},
                first={} if bool(mask[start]) else {layer: entered[layer][row, start] for layer in layers},
                attention={layer: found[row] for layer, found in from_text.items()},
                received={layer: found[row] for layer, found in from_all.items()},
                column_sums=None if columns is None else columns[row],
            )
        )
    return out


def _received(captured: Captured, visual: Tensor, attended: Tensor | None) -> list[Tensor]:
    """For each row the shares `(n,)` of attention that its visual tokens get from the text behind the last of them."""
    visual = visual.to(captured.query.device)
    real = torch.ones_like(visual) if attended is None else attended.to(visual.device).bool()
    behind = real & (visual.int().flip(1).cumsum(dim=1).flip(1) == 0)
    if not bool(behind.any(dim=1).all()):
        raise DartLabError("no text stands behind a picture, so there is none whose attention could be read")
    asked = torch.nn.utils.rnn.pad_sequence(
        [row.nonzero()[:, 0] for row in behind], batch_first=True, padding_value=PAD
    )  # fmt: skip
    rows = attention_rows(captured, asked, 0).mean(dim=1)  # (batch, asked, keys)
    got = (rows * (asked != PAD)[..., None]).sum(dim=1)
    return [one[mask] / one[mask].sum() for one, mask in zip(got, visual, strict=True)]


def text_states(model: Any, token_ids: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Tensor]:
    """Inputs of decoder layers for texts without a picture: one `(layers, tokens, channels)` float32 a text.

    Each text runs alone, so that no padding is involved.

    Raises:
        DartLabError: an empty text, or a layer that does not exist.
    """
    model = model_of(model)
    text = compat.text_model(model)
    depth, wanted = len(text.layers), list(layers)
    if not wanted or min(wanted) < 0 or max(wanted) >= depth:
        raise DartLabError(f"layers={wanted}: {type(model).__name__} has decoder layers 0 to {depth - 1}")
    out = []
    for ids in token_ids:
        if not len(ids):
            raise DartLabError("a text without tokens has no states")
        entered: dict[int, Tensor] = {}
        handles = [text.layers[layer].register_forward_pre_hook(_note(entered, layer, max(wanted)), with_kwargs=True)
                   for layer in wanted]  # fmt: skip
        try:
            with torch.no_grad(), suppress(_Enough):
                text(inputs_embeds=model.get_input_embeddings()(_row(ids, model)), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        out.append(torch.stack([entered[layer][0].float() for layer in wanted]))
    return out


def _row(ids: Sequence[int], model: Any) -> Tensor:
    return torch.tensor([list(ids)], device=model.get_input_embeddings().weight.device)


def _note(entered: dict[int, Tensor], layer: int, last: int) -> Callable[..., None]:
    """A hook that keeps what a layer receives, and stops the run at the last one wanted."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        entered[layer] = states.detach()
        if layer == last:
            raise _Enough

    return hook


def _one_to_one(features: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor] | None:
    """Features `(pictures, patches, channels)` as one `(n, channels)` a sample, if there is one a visual token."""
    if not features:
        return None
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in features])
    return list(rows.split(list(counts))) if len(rows) == sum(counts) else None
