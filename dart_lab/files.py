"""Writing result files: all of a set or none, never half a file."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from dart_lab.errors import DartLabError, StorageError

_NEW_FILE_MODE = 0o666
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}


def write_files(contents: Mapping[Path, bytes], *, durable: bool = False) -> list[Path]:
    """Write every file, each under a temporary name beside its target, then rename them all.

    If one cannot be written (no space, no permission), none of the targets is created or changed.

    Args:
        contents: path → bytes. Missing folders are made.
        durable: wait until the disk holds the bytes and the names, so that a power cut takes neither. Default False.

    Returns:
        The paths, in the order given.

    Raises:
        DartLabError: a file cannot be written; `StorageError` if the disk is full or broken.

    >>> folder = Path(tempfile.mkdtemp())
    >>> [path.name for path in write_files({folder / "a.txt": b"one", folder / "b.txt": b"two"})]
    ['a.txt', 'b.txt']
    >>> sorted(path.name for path in folder.iterdir())
    ['a.txt', 'b.txt']
    """
    ready: list[tuple[Path, Path]] = []
    check_targets(contents)
    path = Path()
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            ready.append((_temporary_beside(path), path))
            ready[-1][0].write_bytes(content)
            if durable:
                _sync(ready[-1][0], os.O_RDONLY)
        for temporary, path in ready:
            temporary.replace(path)
        if durable:
            for folder in {path.parent for _, path in ready}:
                _sync(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        for temporary, _ in ready:
            temporary.unlink(missing_ok=True)
    return list(contents)


def check_targets(paths: Iterable[Path]) -> None:
    """Raise `DartLabError` if a folder has the name of a file that is to be written, or if no file can have it."""
    for path in paths:
        try:
            folder = path.is_dir()
        except OSError as error:  # a name longer than the file system takes
            raise cannot_write(path, error) from error
        if folder:
            raise DartLabError(f"{path} is a folder, and a file of that name is to be written; move the folder away")


def check_not_input(target: Path, source: Path) -> None:
    """Raise `DartLabError` if a file that is to be written is one that is read."""
    if target.exists() and source.exists() and target.samefile(source):
        raise DartLabError(f"{target} is the input and would be overwritten; give another name for the output")


def write_somewhere(contents: Mapping[Path, bytes]) -> list[Path]:
    """`write_files`, or, where that fails, the same files in a new temporary folder: what was computed is not lost.

    Raises:
        DartLabError: as `write_files`; the message says where the files lie instead.
    """
    try:
        return write_files(contents)
    except DartLabError as error:
        try:
            rescue = Path(tempfile.mkdtemp(prefix="dart-lab-"))
            write_files({rescue / path.name: content for path, content in contents.items()})
        except (DartLabError, OSError):
            raise error from None
        raise type(error)(f"{error}; the files were written to {rescue} instead") from error


def cannot_write(path: Path, error: OSError) -> DartLabError:
    """The error to raise when `path` cannot be written: whose fault it is, and what to do."""
    said = f"{path} cannot be written ({error.strerror or error})"
    if error.errno in _DISK:
        return StorageError(f"{said}; free some space or choose another place")
    return DartLabError(f"{said}; choose another place")


def _sync(path: Path, how: int) -> None:
    """Wait until the disk holds a file's bytes, or the names in a folder."""
    handle = os.open(path, how)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(folder: Path) -> None:
    """Raise `DartLabError` unless files can be made in `folder`, which itself may be missing; leaves no trace."""
    nearest = folder.absolute()
    try:
        while not nearest.exists():
            nearest = nearest.parent
    except OSError as error:  # a name longer than the file system takes
        raise cannot_write(folder, error) from error
    if not nearest.is_dir():
        raise DartLabError(f"{folder}: {nearest} is a file; give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise DartLabError(f"{folder} cannot be written: no permission in {nearest}; choose another folder")


def _temporary_beside(path: Path) -> Path:
    """An empty file in the target's folder, with the permissions a new file would have."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(name, _NEW_FILE_MODE & ~mask)
    return Path(name)
