"""Qwen3-VL adds vision features behind its first decoder layers too: they go to the visual tokens that are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dart_lab.pruners.reduction import PAD
from dart_lab.vlm.cuts import Cut

_METHOD = "_deepstack_process"


def deepstack_layers(model: Any) -> int:
    """How many of the first decoder layers have vision features added behind them; 0 for other models."""
    return len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def shorten_deepstack(text: nn.Module, cuts: Callable[[], Sequence[Cut]]) -> Callable[[], None]:
    """Make the text model add its features to a shortened sequence; returns what undoes it.

    `cuts`: the cuts that the states behind the layer that ran last have gone through. Merged tokens get the features
    merged in the same way.
    """
    method = getattr(text, _METHOD, None)
    if method is None:
        return lambda: None
    before = vars(text).get(_METHOD)

    def add(states: Tensor, marked: Tensor, features: Tensor) -> Any:
        acting = cuts()
        if not acting:
            return method(states, marked, features)
        added = states.new_zeros(*marked.shape, states.shape[2])
        added[marked.to(states.device)] = features.to(states.device, states.dtype)
        for cut in acting:
            added = cut.states(added)
        return states + added

    def undo() -> None:
        vars(text).pop(_METHOD, None)
        if before is not None:
            setattr(text, _METHOD, before)

    setattr(text, _METHOD, add)
    return undo


def shorten_features(kwargs: dict[str, Any], cut: Cut) -> None:
    """The same for a prompt that is cut before layer 0: drop the features of the tokens that went."""
    marked, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if marked is None or features is None:
        return
    rows = cut.rows.to(marked.device)
    left = marked.gather(1, rows.clamp(min=0)) & (rows != PAD)
    number = (marked.flatten().cumsum(dim=0) - 1).view(marked.shape).gather(1, rows.clamp(min=0))[left]
    kwargs["visual_pos_masks"] = left
    kwargs["deepstack_visual_embeds"] = [each[number.to(each.device)] for each in features]
