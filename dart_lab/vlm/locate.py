"""`layout`: where the visual tokens of a batch lie, without running the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dart_lab.errors import DartLabError
from dart_lab.vlm.families import family_of
from dart_lab.vlm.families.base import placed
from dart_lab.vlm.families.minicpm import marked_ids
from dart_lab.vlm.layout import TokenLayout, VisualTokens, groups


def model_of(model: Any) -> Any:
    """The Hugging Face model object: of a `VLM` its `.model`, of what `torch.compile` returns the model inside."""
    model = model.model if hasattr(model, "processor") and hasattr(model, "model") else model
    return getattr(model, "_orig_mod", model)


def layout(model: Any, inputs: Mapping[str, Any], images: Sequence[Any] | None = None) -> TokenLayout:
    """Group of every position; image, frame, crop, row, column and pixel box of every visual token.

    Args:
        model: a supported Hugging Face model object, or a `VLM`.
        inputs: what the processor returned; `input_ids` `(batch, sequence)` and, if padded, `attention_mask`.
        images: the original pictures and videos in the order of the prompts (anything with `.size`), to get boxes in
            their pixels; without them boxes are in pixels of the model's own view.

    Raises:
        DartLabError: an unsupported model, a prompt that was cut inside an image, or more or fewer images than the
            prompts hold.
    """
    model = model_of(model)
    family = family_of(model)
    if "input_ids" not in inputs:
        raise DartLabError(f"layout needs input_ids; the inputs have {', '.join(inputs) or 'nothing'}")
    ids = marked_ids(inputs)
    visual = family.visual_mask(model, ids).cpu().numpy()
    mask = inputs.get("attention_mask")
    attended = np.ones_like(visual) if mask is None else mask.bool().cpu().numpy()
    rows = list(zip(visual, ids.cpu().numpy(), strict=True))
    samples, held = _placed_rows(model, inputs, rows, None)
    if images is not None:
        if len(images) != held:
            raise DartLabError(
                f"{len(images)} images were given, but the prompts hold {held}; give each one, in the prompts' order"
            )
        samples, _ = _placed_rows(model, inputs, rows, [image.size for image in images])
    return TokenLayout(groups(visual, attended), tuple(samples))


def _placed_rows(
    model: Any, inputs: Mapping[str, Any], rows: Sequence[tuple[np.ndarray, np.ndarray]],
    sizes: Sequence[tuple[int, int]] | None,
) -> tuple[list[VisualTokens], int]:
    """The visual tokens of every row (`visual`, `ids`) of a batch, and how many pictures and videos all hold."""
    family, samples, first = family_of(model), [], 0
    for visual, ids in rows:
        tokens, count = placed(family, model, ids, np.flatnonzero(visual), inputs, first, sizes)
        samples.append(tokens)
        first += count
    return samples, first
