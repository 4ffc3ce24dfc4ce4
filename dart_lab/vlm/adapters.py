"""LoRA adapters made with peft: the model they belong to, with their weights added to its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from dart_lab.errors import DartLabError


def check_adapter(settings: Mapping[str, Any], name: str) -> str:
    """The folder or hub id of the model that an adapter belongs to, from the adapter's `settings`.

    Raises:
        DartLabError: it is no LoRA adapter, names no model, or peft is not installed.
    """
    kind, base = settings.get("peft_type"), settings.get("base_model_name_or_path")
    if kind != "LORA":
        raise DartLabError(f"{name} holds an adapter of kind {kind!r}; only LoRA is supported: merge it first")
    if not base:
        raise DartLabError(f"{name} is a LoRA adapter that names no model; add base_model_name_or_path to its config")
    if find_spec("peft") is None:
        raise DartLabError(f"{name} is a LoRA adapter of {base}, which needs peft; pip install 'dart-lab[lora]'")
    return str(base)


def with_adapter(model: Any, source: str, name: str, options: Mapping[str, Any]) -> Any:
    """The model with a LoRA adapter merged into its weights, W + (α / r) B A; its classes stay as they were.

    Args:
        model: the model that the adapter was trained on.
        source: folder or hub id of the adapter.
        name: what to call the adapter in an error.
        options: further arguments of `from_pretrained`: revision, local_files_only.

    Raises:
        DartLabError: weights of the adapter find no module, or modules no weights: it belongs to another model.
    """
    from peft import PeftConfig, get_peft_model

    asked = {key: value for key, value in options.items() if key != "trust_remote_code"}
    config = PeftConfig.from_pretrained(source, **asked)
    config.inference_mode = True
    adapted = get_peft_model(model, config)
    loaded = adapted.load_adapter(source, adapter_name="default", **asked)
    missing = [key for key in loaded.missing_keys if "lora_" in key]
    unexpected = list(loaded.unexpected_keys)
    if missing or unexpected:
        raise DartLabError(
            f"{name}: the adapter's weights do not fit the model ({(missing or unexpected)[0]} …): it was trained on "
            "another model, or with another release of transformers; merge it there and save the whole model"
        )
    return adapted.merge_and_unload()
