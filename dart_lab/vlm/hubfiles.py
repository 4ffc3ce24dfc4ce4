"""JSON files of a checkpoint, in a folder or on the hub, and what a folder tells before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dart_lab.errors import DartLabError

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
_PICKLED = ("*.bin", "*.pt", "*.pth")


def read_json(source: str, file: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON file of a folder or a hub id; empty if it is not there.

    Args:
        source: a folder, or a hub id.
        file: its name within.
        options: further arguments of `from_pretrained`: revision, trust_remote_code, local_files_only.
    """
    from transformers.utils import cached_file

    asked = {key: value for key, value in options.items() if key != "trust_remote_code"}
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(source, file, **quiet, **asked)
    return json.loads(Path(found).read_text(encoding="utf-8")) if found else {}


def check_folder(folder: Path, name: str) -> dict[str, Any]:
    """The content of a folder's `config.json`, or of its `adapter_config.json` if it holds an adapter.

    Raises:
        DartLabError: the folder is empty, has no config or no weights, its weights are pickled, or some are missing.
    """
    file = next((folder / one for one in (CONFIG, ADAPTER) if (folder / one).is_file()), None)
    if file is None:
        state = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise DartLabError(f"{name} {state}; give a folder in the hub's format (made with save_pretrained)")
    content = _content(file)
    if not any(folder.glob("*.safetensors")):
        if any(found for pattern in _PICKLED for found in folder.glob(pattern)):
            raise DartLabError(f"{name} holds only pickled weights, which can run code; save it again as safetensors")
        raise DartLabError(f"{name} holds no weights (*.safetensors); save the model again with save_pretrained")
    for index in folder.glob("*.safetensors.index.json"):
        named = set((_content(index).get("weight_map") or {}).values())
        missing = sorted(shard for shard in named if not (folder / shard).is_file())
        if missing:
            raise DartLabError(
                f"{name} lacks {len(missing)} of {len(named)} weight files ({missing[0]} …); download it again"
            )
    return content


def check_own_format(config: Mapping[str, Any], name: str) -> None:
    """Raise `DartLabError` for a config of a model's own code, which transformers would fill up with defaults."""
    if "vision_config" not in config and "auto_map" not in config:
        raise DartLabError(
            f"{name}: its config describes no vision_config, so it is in the format of its authors' code, not of "
            "transformers; take the converted checkpoint (often named …-hf)"
        )


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DartLabError(f"{file} is not valid JSON ({error}); save the model again") from None
    return content if isinstance(content, dict) else {}
