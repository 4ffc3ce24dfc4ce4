"""`final_states`: what the last token of a prompt has become after the last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dart_lab.vlm import compat
from dart_lab.vlm.locate import model_of


def final_states(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """`(batch, channels)` float32: the last token's state after the final norm, from one run of the prompt.

    Inside a `prune` block it is that of the pruned prompt. Prompts are left padded.

    >>> import dart_lab as dl
    >>> vlm, sample = dl.load("tiny"), dl.load_task("shapes", n=1, seed=0)[0]
    >>> final_states(vlm, vlm.prepare([sample.image], [sample.question])).shape
    torch.Size([1, 128])
    """
    model = model_of(model)
    found: list[Tensor] = []
    norm = compat.text_model(model).norm
    handle = norm.register_forward_hook(lambda module, args, output: found.append(output[:, -1].detach().float()))
    try:
        with torch.no_grad():
            model(**{**inputs, "use_cache": False, "logits_to_keep": 1})
    finally:
        handle.remove()
    return found[-1]
