"""Tables with their facts in one Parquet file: same rows and facts, same bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dart_lab.errors import DartLabError

_FACTS = b"dart_lab"


def table_bytes(table: pd.DataFrame, facts: Mapping[str, Any]) -> bytes:
    """A table of numbers, booleans and text as the bytes of a Parquet file.

    Args:
        table: any columns; the index is left out.
        facts: what JSON can hold: provenance, budgets, results.

    Raises:
        DartLabError: a column that mixes kinds, or facts that are not JSON.

    >>> frame = pd.DataFrame({"method": ["dart"], "accuracy": [0.5]})
    >>> table_bytes(frame, {}) == table_bytes(frame.copy(), {})
    True
    """
    try:
        return parquet_bytes(pa.Table.from_pandas(table, preserve_index=False), facts)
    except pa.ArrowException as error:
        raise DartLabError(f"the table cannot be written: {error}") from error


def parquet_bytes(table: pa.Table, facts: Mapping[str, Any]) -> bytes:
    """An Arrow table as Parquet, with the facts and nothing else in its metadata."""
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({_FACTS: facts_json(facts).encode()}), buffer, compression="zstd")
    return buffer.getvalue()


def load_table(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read a table and its facts.

    Raises:
        DartLabError: no such file, or not Parquet.
    """
    try:
        table = pq.read_table(Path(path))
    except FileNotFoundError as error:
        raise DartLabError(f"{path}: no such file; give the Parquet file of an earlier run") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise DartLabError(f"{path} is no readable Parquet file; give the .parquet file of an earlier run") from error
    return table.to_pandas(), json.loads((table.schema.metadata or {}).get(_FACTS, b"{}"))


def facts_json(facts: Mapping[str, Any], indent: int | None = None) -> str:
    """Facts as JSON, keys in their own order; NaN is refused, for JSON has none."""
    try:
        return json.dumps(facts, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise DartLabError(f"the facts of a trace must be plain JSON values: {error}") from error
