"""One adapter a model family: which of its tokens are visual, and how they lie on the picture."""

from __future__ import annotations

from typing import Any

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.vlm.families.anyres import LLAVA_NEXT, LLAVA_ONEVISION
from dart_lab.vlm.families.base import Family
from dart_lab.vlm.families.idefics import IDEFICS
from dart_lab.vlm.families.internvl import INTERNVL
from dart_lab.vlm.families.llava import LLAVA
from dart_lab.vlm.families.qwen import QWEN

FAMILIES: tuple[Family, ...] = (LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, QWEN, INTERNVL, IDEFICS)

__all__ = ["FAMILIES", "Family", "family_of", "supported_model_types"]


def supported_model_types() -> list[str]:
    """The `model_type` values of configs that dart-lab knows."""
    return sorted(model_type for family in FAMILIES for model_type in family.model_types)


def find_family(model: Any) -> Family | None:
    """The adapter for a model object, or None."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def family_of(model: Any) -> Family:
    """The adapter for a model object. Raises `DartLabError` with the supported types for any other model."""
    family = find_family(model)
    if family is None:
        given = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        raise DartLabError(
            f"model type {given!r} is not supported. {did_you_mean(given, supported_model_types())} Any decoder works "
            "with prune(model, pruner, visual=mask), where the mask marks the visual tokens"
        )
    return family
