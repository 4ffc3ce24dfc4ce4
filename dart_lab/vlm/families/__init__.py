"""One adapter a model family: which of its tokens are visual, and how they lie on the picture."""

from __future__ import annotations

from typing import Any

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.vlm.families.anyres import LLAVA_NEXT, LLAVA_ONEVISION
from dart_lab.vlm.families.base import Family
from dart_lab.vlm.families.idefics import IDEFICS
from dart_lab.vlm.families.internvl import INTERNVL
from dart_lab.vlm.families.llava import LLAVA
from dart_lab.vlm.families.minicpm import MINICPM
from dart_lab.vlm.families.qwen import QWEN
from dart_lab.vlm.families.video_llava import VIDEO_LLAVA

FAMILIES: tuple[Family, ...] = (LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, QWEN, INTERNVL, IDEFICS, VIDEO_LLAVA, MINICPM)

#: model_type that has no adapter on purpose → why.
REFUSED = dict.fromkeys(
    ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"),
    "most of its decoder layers have linear attention, whose state would cover other tokens after pruning; MiniCPM-V "
    "2.6 (model type 'minicpmv', of its authors' code) is supported",
)

_OWN = "dart_lab_family"
_ANSWERS = ("name", "model_types", "prompt", "whole", "visual_mask", "tokens", "pixel_rows", "regions")

__all__ = ["FAMILIES", "REFUSED", "Family", "family_of", "supported_model_types", "use_family"]


def supported_model_types() -> list[str]:
    """The `model_type` values of configs that dart-lab knows."""
    return sorted(model_type for family in FAMILIES for model_type in family.model_types)


def use_family(model: Any, family: Family) -> None:
    """Give one model object an adapter of your own, which everything here then uses for it.

    Args:
        model: the model object; the adapter is kept on it, as `dart_lab_family`.
        family: the adapter; it wins over one that dart-lab has for the model's type.

    Raises:
        DartLabError: the adapter lacks something that an adapter must have.

    >>> import dart_lab as dl
    >>> from dart_lab.vlm.families.llava import Llava
    >>> vlm = dl.load("tiny")
    >>> use_family(vlm.model, Llava(name="my-llava"))
    >>> family_of(vlm.model).name
    'my-llava'
    """
    lacking = [name for name in _ANSWERS if not hasattr(family, name)]
    if lacking:
        raise DartLabError(f"{family!r} is no adapter: it has no {', '.join(lacking)}; see docs/new_family.md")
    setattr(model, _OWN, family)


def find_family(model: Any) -> Family | None:
    """The adapter for a model object, or None."""
    own: Family | None = getattr(model, _OWN, None)
    if own is not None:
        return own
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def family_of(model: Any) -> Family:
    """The adapter for a model object. Raises `DartLabError` with the supported types for any other model."""
    family = find_family(model)
    if family is None:
        given = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        if given in REFUSED:
            raise DartLabError(f"model type {given!r} is refused: {REFUSED[given]}")
        raise DartLabError(
            f"model type {given!r} is not supported. {did_you_mean(given, supported_model_types())} Any decoder works "
            "with prune(model, pruner, visual=mask), where the mask marks the visual tokens; to write an adapter, see "
            "docs/new_family.md"
        )
    return family
