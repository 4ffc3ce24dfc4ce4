"""Put the parts together: a folder in the hub's own LLaVA format, which loads with stock transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dart_lab.files import write_files
from dart_lab.mini import configs
from dart_lab.mini.network import ALPHA, RANK

PROJECTOR = "projector."
ADAPTERS = "adapters."


def whole_state(
    vision: Mapping[str, Tensor], language: Mapping[str, Tensor], trained: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All weights under the names of LLaVA checkpoints on the hub, float32.

    Args:
        vision: the vision tower, as `convert.vision_state` gives it.
        language: the language model, as `convert.language_state` gives it.
        trained: projector and adapters; the adapters are added to the matrices that they adapt.
    """
    state = {f"vision_tower.{name}": tensor for name, tensor in vision.items()}
    state |= {f"language_model.model.{name}": tensor for name, tensor in language.items()}
    for name, tensor in trained.items():
        if name.startswith(PROJECTOR):
            state[f"multi_modal_projector.{name.removeprefix(PROJECTOR)}"] = tensor.float()
        elif name.endswith(".lora_a"):
            stem = name.removesuffix(".lora_a")
            target = f"language_model.model.{stem.removeprefix(ADAPTERS).replace('/', '.')}.weight"
            added = trained[f"{stem}.lora_b"].double() @ tensor.double() * (ALPHA / RANK)
            state[target] = (state[target].double() + added).float()
    return {name: tensor.contiguous() for name, tensor in state.items()}


def untrained_projector() -> dict[str, Tensor]:
    """A projector that maps everything to zero, to put the parts together before anything is trained."""
    shapes = {
        "linear_1.weight": (configs.WIDTH, configs.VISION_WIDTH), "linear_1.bias": (configs.WIDTH,),
        "linear_2.weight": (configs.WIDTH, configs.WIDTH), "linear_2.bias": (configs.WIDTH,),
    }  # fmt: skip
    return {PROJECTOR + name: torch.zeros(shape) for name, shape in shapes.items()}


def write_folder(folder: Path, state: Mapping[str, Tensor], tokenizer: Any) -> None:
    """Write all files of the checkpoint, all or none.

    Raises:
        DartLabError: a file cannot be written.
    """
    contents = {
        folder / name: (json.dumps(content, indent=2) + "\n").encode()
        for name, content in {"config.json": configs.model_config(), **configs.other_configs()}.items()
    }
    contents[folder / "tokenizer.json"] = tokenizer.to_str().encode()
    contents[folder / "model.safetensors"] = save(dict(state), {"format": "pt"})
    write_files(contents)
