"""A study's folder: plan, provenance, and one Parquet part a block of samples; killed anywhere, it ends the same.

plan.json          the study
provenance.json    model → where its numbers come from
parts/000012.parquet    the records of one cell; written whole and flushed to the disk, or not there
times/000012.json  how long it took; not part of the result
records.parquet    all parts in the order of the plan, once every cell is done
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dart_lab.errors import DartLabError
from dart_lab.files import cannot_write, write_files
from dart_lab.studies.plan import Study, study_from

PLAN, PROVENANCE, RECORDS, LOCK = "plan.json", "provenance.json", "records.parquet", "lock"

_HOLDER = 200  # bytes of a lock that are read to say who holds it

#: Columns of the records; the same types in every part, whatever it holds.
SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("task", pa.string()),
        ("condition", pa.string()),
        ("sample", pa.string()),
        ("image_id", pa.string()),
        ("family", pa.string()),
        ("question", pa.string()),
        ("prediction", pa.string()),
        ("answer", pa.string()),
        ("correct", pa.float64()),
        ("visual", pa.int64()),
        ("asked", pa.int64()),
        ("got", pa.int64()),
        ("processed", pa.float64()),
        ("output", pa.float64()),
        ("shared", pa.bool_()),
        ("reason", pa.string()),
        ("margin", pa.float64()),
        ("tie_sensitive", pa.bool_()),
        ("failure", pa.string()),
    ]
)
#: What provenance of a model must say before records are written.
NEEDED = ("model", "weights_sha256", "dtype", "attention", "prompt", "versions")


@dataclass(frozen=True)
class Store:
    """The folder of a study that is being run or has been."""

    folder: Path
    study: Study

    @classmethod
    def create(cls, folder: str | Path, study: Study) -> Store:
        """Make the folder, or go on with one that holds the same study.

        The plan is read and written under the lock, so that of two processes that start at once only one makes it.

        Raises:
            DartLabError: the folder holds another study, or files that are none, or another process is at work here.
        """
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise DartLabError(f"{path} is a file; give a folder")
        if path.is_dir():
            _refuse_strangers(path)  # before anything is written, a lock included
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        with _alone(path):
            if not (path / PLAN).exists():
                write_files({path / PLAN: _json(study.as_dict())}, durable=True)
                return cls(path, study)
            store = cls.open(path)
        if store.study.fingerprint != study.fingerprint:
            raise DartLabError(f"{path} holds another study; give another folder, or resume that one as it is")
        return store

    @classmethod
    def open(cls, folder: str | Path) -> Store:
        """The study of a folder. Raises `DartLabError` if there is none, or its plan cannot be read."""
        path = Path(folder)
        try:
            plain = json.loads((path / PLAN).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DartLabError(
                f"{path} holds no study ({PLAN} is missing); run one with: dart-lab study run"
            ) from error
        except (OSError, ValueError) as error:
            raise DartLabError(f"{path / PLAN} cannot be read ({error}); start again in another folder") from error
        return cls(path, study_from(plain, str(path / PLAN)))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out while the block runs. The system lets go of the lock when its process ends.

        Raises:
            DartLabError: another process is at work here, or the folder cannot be written.
        """
        with _alone(self.folder):
            self._sweep()
            yield

    def _sweep(self) -> None:
        """Remove what a killed process left half written."""
        for folder in (self.folder, self.folder / "parts", self.folder / "times"):
            for stray in folder.glob(".*.*") if folder.is_dir() else ():
                stray.unlink(missing_ok=True)

    def check_provenance(self, model: str, facts: Mapping[str, Any]) -> None:
        """Note where a model's numbers come from; later runs must come from the same.

        Raises:
            DartLabError: something needed is missing, or the model, its weights or a version have changed.
        """
        missing = [name for name in NEEDED if facts.get(name) in (None, "")]
        if missing:
            raise DartLabError(
                f"{model}: the provenance lacks {missing[0]}, so that nobody could tell what its numbers come from; "
                "load the model from a folder or a hub id"
            )
        path, known = self.folder / PROVENANCE, self.provenance()
        plain = json.loads(json.dumps(facts))
        if model not in known:
            write_files({path: _json({**known, model: plain})}, durable=True)
        elif known[model] != plain:
            changed = [name for name in plain if known[model].get(name) != plain[name]]
            raise DartLabError(
                f"{model} is not what it was when this study began: {', '.join(changed) or 'an entry'} changed; "
                "start again in another folder"
            )

    def provenance(self) -> dict[str, Any]:
        """Model → where its numbers come from, as far as it is known."""
        path = self.folder / PROVENANCE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def adopt(self, other: Store, cell: int) -> None:
        """Take a cell's part over from another folder."""
        write_files({self.part(cell): other.part(cell).read_bytes()}, durable=True)

    def has(self, cell: int) -> bool:
        """Whether a cell's part is there and can be read; one that cannot is taken for missing."""
        path = self.part(cell)
        if not path.exists():
            return False
        try:
            return bool(pq.read_schema(path).equals(SCHEMA))
        except (OSError, pa.ArrowInvalid):
            return False

    def part(self, cell: int) -> Path:
        """Where a cell's records lie."""
        return self.folder / "parts" / f"{cell:06d}.parquet"

    def save(self, cell: int, records: pd.DataFrame, seconds: Mapping[str, float]) -> None:
        """Write a cell's records; they are on the disk when this returns."""
        table = pa.Table.from_pandas(records, schema=SCHEMA, preserve_index=False).replace_schema_metadata(None)
        times = self.folder / "times" / f"{cell:06d}.json"
        write_files({times: _json(dict(seconds))})
        write_files({self.part(cell): _parquet(table)}, durable=True)

    def merge(self, cells: int) -> Path:
        """Put all parts together, in the order of the plan: `records.parquet`, the same bytes each time.

        Raises:
            DartLabError: a part is missing.
        """
        missing = [cell for cell in range(cells) if not self.has(cell)]
        if missing:
            raise DartLabError(f"{len(missing)} of {cells} parts are missing; run dart-lab study resume {self.folder}")
        target = self.folder / RECORDS
        partial = self.folder / f".{RECORDS}.partial"
        try:
            with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
                for cell in range(cells):
                    writer.write_table(pq.read_table(self.part(cell), schema=SCHEMA))
            partial.replace(target)
        except OSError as error:
            raise cannot_write(target, error) from error
        finally:
            partial.unlink(missing_ok=True)
        return target

    def records(self) -> pd.DataFrame:
        """All records of a study that is done. Raises `DartLabError` if it is not."""
        path = self.folder / RECORDS
        if not path.exists():
            raise DartLabError(f"{self.folder} is not done yet; run dart-lab study resume {self.folder}")
        return pq.read_table(path).to_pandas()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; see `Store.locked`."""
    path = folder / LOCK
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise DartLabError(f"{path} cannot be written ({error.strerror}); choose another folder") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, _HOLDER).decode(errors="replace").strip() or "unknown"
            raise DartLabError(
                f"{folder} is in use by another process ({holder}); wait for it, or give another folder"
            ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        os.close(handle)


def _refuse_strangers(folder: Path) -> None:
    """Raise `DartLabError` if a folder without a plan holds anything but what a start that was killed leaves."""
    names = {file.name for file in folder.iterdir()}
    strange = [name for name in names if name != LOCK and not name.startswith(f".{PLAN}.")]
    if PLAN not in names and strange:
        raise DartLabError(f"{folder} holds files that are no study; give an empty folder")


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n").encode()
