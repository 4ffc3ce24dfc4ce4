"""`load`: "tiny", "mini", a folder or a hub id becomes a model with its processor, ready for pictures and questions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.mini.get import cache_folder, is_current
from dart_lab.vlm.adapters import check_adapter, with_adapter
from dart_lab.vlm.families import REFUSED, family_of, supported_model_types
from dart_lab.vlm.hubfiles import ADAPTER, CONFIG, check_folder, check_own_format, read_json
from dart_lab.vlm.processors import PICTURE_SETTINGS, load_processor
from dart_lab.vlm.quantization import check_quantization, quantization_config
from dart_lab.vlm.vlm import VLM

#: Models that come with the package: name → folder beside the package's own files.
PACKAGED = {"tiny": Path(__file__).parents[1] / "tiny" / "checkpoint"}
#: The model that `dart-lab get mini` puts together.
MINI = "mini"
NAMES = (*PACKAGED, MINI)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_SECONDS = 10
_UNREACHABLE = {
    "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException",
}
_AUTO_CLASSES = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")
_DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")


def load(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    quantization: str | None = None,
    trust_remote_code: bool = False,
) -> VLM:
    """Load a vision-language model and its processor.

    Args:
        name: "tiny" (comes with the package, works offline), "mini" (after `dart-lab get mini`), a folder in the hub's
            format, or a hub id `owner/name`. A LoRA adapter's folder or id gives its model with the adapter merged in
            (needs `dart-lab[lora]`).
        revision: branch, tag or commit of a hub id. Default: its main branch.
        dtype: "auto" is the checkpoint's own type, except that float16 becomes float32 on a CPU, where half precision
            is slow and inexact; or "float32", "float16", "bfloat16", "float64", or a `torch.dtype`.
        device: "cpu", "cuda", "cuda:1" … Default: the GPU if there is one.
        device_map: spreads a large model over devices instead: "auto", or module → device (needs accelerate).
        quantization: "4bit" or "8bit" weights (needs `dart-lab[quantization]`). Default: as they are.
        trust_remote_code: run code that comes with the checkpoint. Default False; leave it so unless you trust the
            author.

    Returns:
        A `VLM` in evaluation mode. Weights are read from safetensors only.

    Raises:
        DartLabError: unknown name, no such folder, no config, weights or processor in it, weights that do not fit the
            config, an unsupported model type, a hub that cannot be reached, an unknown dtype or device, an option whose
            package is missing.

    >>> import dart_lab as dl
    >>> vlm = dl.load("tiny")
    >>> vlm.name, vlm.family.name
    ('tiny', 'llava')
    """
    if not isinstance(name, str | os.PathLike):
        raise DartLabError(f"{name!r} names no model; give 'tiny', 'mini', a folder, or a hub id as owner/name")
    name = os.fspath(name)
    place = _device(device)
    wanted = _dtype(dtype)
    if quantization is not None:
        check_quantization(quantization)
    if device_map is not None:
        _check_device_map(device_map, device)
    check_model_name(name, revision=revision)
    how = _How(place, wanted, device_map, quantization)
    with _quiet(), _one_line_errors(name):
        files = _Files.of(name, revision, trust_remote_code)
        adapter = files.json(ADAPTER) if not files.json(CONFIG) else {}
        if not adapter:
            model, processor = _model(files, how), load_processor(files.source, name, files.config(), files.options)
            return VLM(model=model, processor=processor, name=name, family=family_of(model), folder=files.folder(model))
        check_model_name(check_adapter(adapter, name))
        base = _Files.of(check_adapter(adapter, name), adapter.get("revision"), trust_remote_code)
        model = with_adapter(_model(base, how), files.source, name, files.options).eval()
        own = files if any(files.json(file) for file in PICTURE_SETTINGS) else base
        processor = load_processor(own.source, name, base.config(), own.options)
    return VLM(
        model=model, processor=processor, name=name, family=family_of(model), folder=files.folder(model),
        base=base.folder(model),
    )  # fmt: skip


@dataclass(frozen=True)
class _How:
    """Where the weights go, and in what type."""

    place: torch.device
    dtype: torch.dtype | None
    device_map: str | Mapping[str, Any] | None
    quantization: str | None


@dataclass(frozen=True)
class _Files:
    """A checkpoint: its name, the folder or hub id, and how `from_pretrained` is to look for it."""

    name: str
    source: str
    options: dict[str, Any]

    @classmethod
    def of(cls, name: str, revision: str | None, trust_remote_code: bool) -> _Files:
        folder = _place_of(name)
        local = folder.is_dir() or not _hub_answers(name, revision)
        options = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local}
        return cls(name, str(folder) if folder.is_dir() else name, options)

    def json(self, file: str) -> dict[str, Any]:
        return read_json(self.source, file, self.options)

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.source, **self.options)

    def folder(self, model: Any) -> Path | None:
        """Where the files lie: the folder itself, or the hub's snapshot in the cache."""
        if Path(self.source).is_dir():
            return Path(self.source)
        from huggingface_hub import try_to_load_from_cache

        commit = getattr(model.config, "_commit_hash", None)  # later releases do not say it
        for file, revision in ((CONFIG, commit or self.options["revision"]), (ADAPTER, self.options["revision"])):
            found = try_to_load_from_cache(self.source, file, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
        return None


def check_model_name(name: str, *, revision: str | None = None) -> None:
    """Raise `DartLabError` for a name that cannot be loaded, without loading anything or asking the hub.

    Args:
        name: as in `load`.
        revision: as in `load`; only hub ids have revisions.
    """
    if not name.strip():
        raise DartLabError("the model's name is empty; give 'tiny', 'mini', a folder or a hub id")
    folder = _place_of(name)
    if name in PACKAGED and not (folder / "config.json").is_file():
        raise DartLabError(f"model {name!r} is not in this installation; install dart-lab again")
    if name == MINI and not is_current(folder):
        state = "was made by another version" if (folder / "config.json").is_file() else "is not on this disk yet"
        raise DartLabError(f"model 'mini' {state}; run: dart-lab get mini (fetches 183 MB once), or take 'tiny'")
    if folder.is_dir():
        if revision is not None:
            raise DartLabError(f"revision={revision!r}: {name} is a folder and has no revisions; leave it out")
        _check_folder(folder, name)
    elif folder.is_file():
        raise DartLabError(f"{name} is a file; give the folder that holds config.json and the weights")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise DartLabError(f"{name}: no such folder; check the path")
    elif not _HUB_ID.fullmatch(name):
        raise DartLabError(
            f"unknown model {name!r}. {did_you_mean(name, NAMES)} A folder must exist; a hub id is owner/name"
        )


def decoder_layers(name: str) -> int | None:
    """How many decoder layers a packaged model or a folder has, from its config alone; None if that does not tell."""
    config = _place_of(name) / "config.json"
    if not config.is_file():
        return None
    depth = json.loads(config.read_text(encoding="utf-8")).get("text_config", {}).get("num_hidden_layers")
    return depth if isinstance(depth, int) else None


def _place_of(name: str) -> Path:
    """The folder of a model that has a name, else the name as a path."""
    return cache_folder() if name == MINI else PACKAGED.get(name, Path(name).expanduser())


def _check_folder(folder: Path, name: str) -> None:
    content = check_folder(folder, name)
    if not (folder / CONFIG).is_file():
        check_adapter(content, name)
        return
    check_model_type(content.get("model_type"), name)
    check_own_format(content, name)


def check_model_type(model_type: object, name: str) -> None:
    """Raise `DartLabError` unless dart-lab has an adapter for this `model_type`."""
    known = supported_model_types()
    if model_type in REFUSED:
        raise DartLabError(f"{name}: model_type {model_type!r} is refused: {REFUSED[str(model_type)]}")
    if model_type not in known:
        given = "nothing" if model_type is None else repr(model_type)
        raise DartLabError(
            f"{name}: model_type is {given}, which is not supported. {did_you_mean(str(model_type), known)}"
        )


def _auto_class(config: Any) -> Any:
    """The class of transformers that builds a model: for one of its authors' code, a class that this code names."""
    import transformers
    from transformers.models.auto import modeling_auto

    named = getattr(config, "auto_map", {})
    chosen = next((name for name in _AUTO_CLASSES if name in named), _AUTO_CLASSES[0])
    if type(config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        chosen = _AUTO_CLASSES[0]
    elif type(config) in modeling_auto.MODEL_FOR_PRETRAINING_MAPPING:  # Video-LLaVA in transformers 4
        chosen = "AutoModelForPreTraining"
    return getattr(transformers, chosen)


def _model(files: _Files, how: _How) -> Any:
    config, wanted = files.config(), how.dtype
    check_model_type(config.model_type, files.name)
    check_own_format(files.json(CONFIG), files.name)
    if wanted is None:
        own = getattr(config, "dtype", None)
        wanted = torch.float32 if how.place.type == "cpu" and own in (torch.float16, "float16") else None
    placed: dict[str, Any] = {}
    if how.quantization is not None:
        placed["quantization_config"] = quantization_config(how.quantization, wanted)
        placed["device_map"] = {"": how.place}
    if how.device_map is not None:
        placed["device_map"] = how.device_map
    model, report = _auto_class(config).from_pretrained(
        files.source, dtype=wanted or "auto", use_safetensors=True, output_loading_info=True, **placed, **files.options
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise DartLabError(
            f"{files.name}: {len(missing)} weights are missing ({missing[0]} …), the model would answer at random; "
            "save or download it again"
        )
    return (model if placed else model.to(how.place)).eval()


def _hub_answers(name: str, revision: str | None) -> bool:
    """One short question to the hub, so that nobody waits for a long row of retries; False if it cannot be reached."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, revision=revision, timeout=_HUB_SECONDS)
    except Exception as error:
        if _class_names(error) & _UNREACHABLE:
            return False
        raise DartLabError(f"{name}: {_explain(error)}") from error
    return True


def _check_device_map(device_map: str | Mapping[str, Any], device: str | torch.device | None) -> None:
    if device is not None:
        raise DartLabError(f"device={str(device)!r} and device_map={device_map!r} are both given; leave one out")
    if find_spec("accelerate") is None:
        raise DartLabError(f"device_map={device_map!r} needs accelerate, which is missing; pip install accelerate")


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise DartLabError(f"device={str(device)!r} cannot be used here; available: {here}") from error
    return found


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The type as torch knows it; None for "auto"."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise DartLabError(f"dtype={str(dtype)!r} is not supported. {did_you_mean(name, _DTYPES)}")
    return None if name == "auto" else getattr(torch, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines and no progress bars of transformers meanwhile."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Turn what transformers and the hub raise into one line that says what to do."""
    try:
        yield
    except DartLabError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise DartLabError(f"{name}: {_explain(error)}") from error


def _explain(error: BaseException) -> str:
    causes = _class_names(error)
    text = " ".join(str(error).split())
    if "GatedRepoError" in causes:
        return "the hub asks for your consent; accept the licence on its page and log in with `hf auth login`"
    if "RevisionNotFoundError" in causes:
        return "the hub has no such revision; check the branch, tag or commit"
    if causes & _UNREACHABLE:
        return "not on this disk, and the hub cannot be reached; connect, or give a folder (or the model 'tiny')"
    if "RepositoryNotFoundError" in causes:
        return "neither a folder nor a model on the hub; check the spelling (private models need `hf auth login`)"
    if "trust_remote_code" in text:
        return "this checkpoint needs its own code; read it, then give trust_remote_code=True"
    if isinstance(error, SafetensorError):
        return f"a weights file is damaged or cut short ({text[:100]}); download it again"
    if "torchvision" in text.lower():
        return "its processor needs torchvision, which is not installed; use a model of another family"
    return f"cannot be loaded ({text[:300]}); check that the folder or hub id holds a whole model"


def _class_names(error: BaseException) -> set[str]:
    """Names of the classes of an error and of all that led to it."""
    names: set[str] = set()
    link: BaseException | None = error
    while link is not None:
        names.update(cls.__name__ for cls in type(link).__mro__)
        link = link.__cause__ or link.__context__
    return names
