"""A folder of pictures with a table of questions as a task."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.tasks.base import Sample, Task, check_families

TABLES = ("questions.csv", "questions.jsonl")
REQUIRED = ("image", "question")
COLUMNS = (*REQUIRED, "answer", "family", "choices")
DEFAULT_FAMILY = "question"
CHOICE_SEPARATOR = "|"  # between the choices of a row


def _rows(table: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells of every row."""
    if table.suffix == ".csv":
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, {key: value or "" for key, value in row.items() if key is not None}
        return
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DartLabError(f"{table}, line {number}: not JSON ({error.msg})") from error
            if not isinstance(row, dict):
                raise DartLabError(f"{table}, line {number}: expected an object with image and question")
            yield number, {str(key): "" if value is None else str(value) for key, value in row.items()}


def _check(table: Path, number: int, row: dict[str, str]) -> dict[str, str]:
    for column in REQUIRED:
        if column not in row:
            raise DartLabError(f"{table}, line {number}: no column {column!r}. {did_you_mean(column, row)}")
        if not row[column].strip():
            raise DartLabError(f"{table}, line {number}: {column} is empty")
    for column in row:
        if column not in COLUMNS:
            raise DartLabError(f"{table}: unknown column {column!r}. {did_you_mean(column, COLUMNS)}")
    picture = table.parent / row["image"]
    if not picture.is_file():
        near = did_you_mean(row["image"], (path.name for path in table.parent.iterdir() if path.name not in TABLES))
        raise DartLabError(f"{table}, line {number}: no picture {picture}. {near}")
    return row


def open_picture(path: Path) -> Image.Image:
    """Open a picture as RGB.

    Raises:
        DartLabError: the file is missing, broken or no picture.
    """
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise DartLabError(f"{path} cannot be read as a picture: {error}") from error


def folder_task(folder: Path, *, n: int | None = None, seed: int = 0, families: Sequence[str] | None = None) -> Task:
    """Pictures of a folder with the questions of its ``questions.csv`` or ``questions.jsonl``.

    Columns: ``image`` (file name) and ``question``; ``answer``, ``family`` and ``choices`` (separated by ``|``) may be
    left out. The table is checked at once, pictures are opened when their sample is asked for.

    Args:
        folder: the folder.
        n: number of samples, drawn without replacement and kept in order; by default all.
        seed: seed of that choice.
        families: values of the column ``family`` to keep, by default all.

    Raises:
        DartLabError: no table, a missing column, a missing picture, an empty question, or fewer than ``n`` samples.
    """
    table = next((folder / name for name in TABLES if (folder / name).is_file()), None)
    if table is None:
        raise DartLabError(
            f"{folder} has neither {' nor '.join(TABLES)}: write one with the columns image and question"
        )
    rows = [(number, _check(table, number, row)) for number, row in _rows(table)]
    kinds = dict.fromkeys(row.get("family") or DEFAULT_FAMILY for _, row in rows)
    kept = check_families(families, tuple(kinds)) if families is not None else tuple(kinds)
    rows = [(number, row) for number, row in rows if (row.get("family") or DEFAULT_FAMILY) in kept]
    if not rows:
        raise DartLabError(f"{table} has no questions")
    if n is not None and n > len(rows):
        raise DartLabError(f"n is {n}, but {table} has {len(rows)} questions")
    if n is not None and n < len(rows):
        rng = np.random.Generator(np.random.PCG64(seed))
        rows = [rows[i] for i in sorted(rng.choice(len(rows), size=n, replace=False).tolist())]

    def make(index: int) -> Sample:
        number, row = rows[index]
        choices = tuple(choice.strip() for choice in row.get("choices", "").split(CHOICE_SEPARATOR) if choice.strip())
        return Sample(
            id=f"{folder.name}-{number}",
            image=open_picture(folder / row["image"]),
            question=row["question"].strip(),
            answer=row.get("answer", "").strip(),
            family=row.get("family") or DEFAULT_FAMILY,
            choices=choices,
            image_id=row["image"],
        )

    details = {"folder": folder.name, "table": table.name, "seed": seed, "families": list(kept)}
    return Task(folder.name, len(rows), make, details)
