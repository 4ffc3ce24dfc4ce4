"""What a rolebook is tied to: the weights, the tokenizer, and how pictures are prepared."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

#: What an image processor does to a picture; other fields of it only say how it is stored.
_PICTURE = ("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std", "do_resize", "do_center_crop",
            "do_rescale", "do_normalize", "do_pad", "patch_size", "merge_size", "min_pixels", "max_pixels",
            "image_grid_pinpoints")  # fmt: skip


def identity_of(vlm: Any) -> dict[str, Any]:
    """Hashes of weights and tokenizer, dtype, and the picture settings, as plain JSON values.

    The hash of the weights is that of the values alone, whatever names a release of transformers gives them.
    """
    vocabulary = json.dumps(sorted(vlm.processor.tokenizer.get_vocab().items())).encode()
    return {
        "weights": weights_hash(vlm.model),
        "tokenizer": hashlib.sha256(vocabulary).hexdigest(),
        "image": picture_settings(vlm.processor.image_processor),
    }


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 of the sorted hashes of all parameters, so that names and order do not matter.

    >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> weights_hash(one) == weights_hash(one), weights_hash(one) == weights_hash(other)
    (True, False)
    """
    each = []
    for parameter in model.parameters():
        raw = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        each.append(hashlib.sha256(raw.numpy().tobytes()).hexdigest())
    return hashlib.sha256("\n".join(sorted(each)).encode()).hexdigest()


def picture_settings(image_processor: Any) -> dict[str, Any]:
    """The fields of an image processor that change what the model sees, as plain JSON values."""
    told = image_processor.to_dict()
    kept = {name: told[name] for name in _PICTURE if told.get(name) is not None}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return {name: _without_none(value) for name, value in plain.items()}


def _without_none(value: Any) -> Any:
    return {key: x for key, x in value.items() if x is not None} if isinstance(value, dict) else value
