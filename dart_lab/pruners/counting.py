"""How many visual tokens a method leaves, found without a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.signals import Signals

QUESTION = 16  # text tokens of the made-up prompt, where none are given
CHANNELS, HEADS = 4, 2  # of its made-up states
STATES = ("hidden", "normed", "embeds", "delta")  # signals with channels; others are a number a token


@dataclass(frozen=True)
class Plan:
    """What is left, stage by stage.

    Attributes:
        kept: decoder layer → visual tokens from there on; 0: before the language model.
        asked: what each stage was asked to keep.
        cache: tokens in every layer's cache, where a method cuts it after the prompt.
    """

    kept: dict[int, int]
    asked: tuple[int, ...]
    cache: int | None = None


def planned(pruner: Pruner, *, visual: int, crops: int = 1, text: int = 0) -> Plan:
    """What a method leaves of `visual` tokens, stage by stage.

    A method in or behind the vision tower decides for every crop. A class token that is merged along inside the tower
    does not reach the language model; one that is kept at the tower's end counts as a visual token.

    Raises `DartLabError` for a method whose number of tokens depends on the picture.

    >>> from dart_lab.pruners import FastV
    >>> planned(FastV(keep=0.5, layer=3), visual=576).kept
    {3: 288}
    """
    left, kept, asked, cache = visual, dict[int, int](), [], None
    for part in pruner.parts():
        kind = part.stage.kind
        per_crop = crops if kind in ("VIT_BLOCK", "VISION_OUT", "PROJECTED") else 1
        tower = kind in ("VIT_BLOCK", "VISION_OUT")
        extra = tower and part.keeps_cls
        signals = made_up(
            part, left // per_crop, original=visual // per_crop, text=0 if tower else text or QUESTION,
            before=int(tower), class_is_visual=extra,
        )
        wanted = int(part.asked(signals)[0])
        number = wanted if part.budget == "exact" else int(part(signals).counts[0])
        if number == PAD:
            raise DartLabError(
                f"{part.name}: how many tokens stay depends on the picture; measure it, then use Cost.of"
            )
        number = (number - (extra and kind == "VIT_BLOCK")) * per_crop
        asked.append(wanted)
        if kind == "POST_PREFILL_CACHE":
            cache = number
        else:
            left = kept[part.stage.layer if kind == "LLM_LAYER" else 0] = number
    return Plan(kept, tuple(asked), cache)


def made_up(
    part: Pruner, visual: int, *, original: int, text: int, before: int = 0, class_is_visual: bool = False
) -> Signals:
    """Signals of one sample with random states of every kind that a method needs, drawn from a fixed seed.

    Args:
        part: the method. visual: visual tokens, on a grid as square as it can be. original: those before any stage.
        text: tokens after them.
        before: tokens in front of them, 1 for the class token of a vision tower.
        class_is_visual: whether that one counts among the visual tokens.
    """
    first = 0 if class_is_visual else before
    end = before + visual
    length = end + text

    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=torch.Generator().manual_seed(length))

    def rows(queries: Tensor) -> Tensor:
        return draw(1, HEADS, queries.shape[1], length).softmax(dim=3)

    def provider(name: str) -> Callable[..., Tensor]:
        if name.startswith("attention"):
            return rows
        if name == "sizes":
            return partial(torch.ones, 1, length)
        if name in ("keys", "values"):
            return partial(draw, 1, HEADS, length, CHANNELS)
        return partial(draw, 1, length, CHANNELS) if name in STATES else partial(draw, 1, length)

    columns = next(c for c in range(math.isqrt(max(visual, 1)), 0, -1) if visual % c == 0)
    cells = [(0, 0, -1, -1)] * class_is_visual + [(0, 0, *divmod(token, columns)) for token in range(visual)]
    return Signals(
        visual=torch.arange(first, end)[None], attended=torch.ones(1, length, dtype=torch.bool),
        providers={name: provider(name) for name in part.needs}, grid=torch.tensor([cells]),
        cls=torch.zeros(1, dtype=torch.int64) if before else None, original=torch.tensor([original + class_is_visual]),
    )
