"""What is installed, what is missing, and what to do about it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from dart_lab.errors import DartLabError


@dataclass(frozen=True)
class Finding:
    """One thing looked at: its name, what there is to say, whether it is as it should be, whether it is needed."""

    name: str
    says: str
    good: bool
    needed: bool = True


def examine() -> Iterator[Finding]:
    """Look at Python, the packages, the figures, the device, the attention kernels and the packaged model.

    What is quickly known comes first; each finding is given as soon as it is known.

    >>> next(examine()).name
    'python'
    """
    yield Finding("python", platform.python_version(), sys.version_info >= (3, 11))
    yield from _packages()
    yield _figures()
    yield from _torch()
    yield _torchvision()
    yield _tiny()


def _packages() -> Iterator[Finding]:
    """Every requirement of dart-lab with the version that is installed; those of extras are not needed."""
    from packaging.requirements import Requirement

    seen: set[str] = set()
    try:
        wanted = [Requirement(line) for line in requires("dart-lab") or ()]
    except PackageNotFoundError:
        yield Finding("dart-lab", "not installed, only imported from its folder; run: pip install -e .", False)
        return
    for requirement in wanted:
        needed = requirement.marker is None
        extra = "" if needed else str(requirement.marker).partition("extra == ")[2].strip("\"'")
        if requirement.name in seen or extra == "dev":
            continue
        seen.add(requirement.name)
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            install = f"dart-lab[{extra}]" if extra else str(requirement)
            yield Finding(requirement.name, f"not installed; pip install '{install}'", False, needed)
            continue
        fits = requirement.specifier.contains(installed, prereleases=True)
        says = installed if fits else f"{installed} does not fit {requirement.specifier}; pip install '{requirement}'"
        yield Finding(requirement.name, says, fits, needed)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("device", f"torch cannot be imported ({error})", False)
        return
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding("device", names, True)
    else:
        yield Finding("device", f"CPU, {torch.get_num_threads()} threads (no GPU that torch can use)", True)
    yield Finding("attention", _kernels(torch.cuda.is_available()), True)


def _kernels(gpu: bool) -> str:
    """Which attention kernels there are, which one a model uses, and how to get another."""
    kernels = ["sdpa", "eager"]
    kernels += ["flex_attention"] if find_spec("torch.nn.attention.flex_attention") else []
    flash = find_spec("flash_attn") is not None
    kernels += ["flash_attention_2"] if flash and gpu else []
    other = "another with model.set_attn_implementation(name)"
    if gpu and not flash:
        other += "; flash_attention_2 after pip install 'dart-lab[flash]'"
    elif not gpu:
        other += "; flash_attention_2 needs a GPU"
    return f"a model uses sdpa; there are {', '.join(kernels)}: {other}"


def _torchvision() -> Finding:
    """A torchvision made for another torch breaks the import of every model in transformers."""
    if find_spec("torchvision") is None:
        return Finding("torchvision", "not installed, and not needed: pictures are prepared with Pillow", True)
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:100]
        return Finding("torchvision", f"does not fit this torch ({reason}); run: pip uninstall torchvision", False)
    return Finding("torchvision", str(torchvision.__version__), True)


def _tiny() -> Finding:
    from dart_lab.vlm.load import check_model_name

    try:
        check_model_name("tiny")
    except DartLabError as error:
        return Finding("model tiny", str(error), False)
    return Finding("model tiny", "in the package", True)


def _figures() -> Finding:
    from dart_lab.displays.figure_names import figure_names

    names = figure_names()
    return Finding("figures", ", ".join(names) or "none found; install dart-lab again: pip install -e .", bool(names))
