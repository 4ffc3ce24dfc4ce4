"""The tidy record of a pruned run: one row a visual token, kept in Parquet with its provenance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.files import write_files
from dart_lab.probes.tables import facts_json as facts_json
from dart_lab.probes.tables import load_table, parquet_bytes

_LABEL = pa.dictionary(pa.int16(), pa.string())

#: Columns every trace has, in the order of the file.
REQUIRED: dict[str, pa.DataType] = {
    "sample": pa.int32(),
    "image": pa.int32(),
    "frame": pa.int32(),
    "crop": pa.int32(),
    "row": pa.int32(),
    "column": pa.int32(),
    "kept": pa.bool_(),
    "method": _LABEL,
    "stage": _LABEL,
    "layer": pa.int32(),
    "asked": pa.int32(),
    "got": pa.int32(),
}
#: Columns a trace may have besides: `keep` is the budget as it was given ("64"), `flip` how the picture was turned.
OPTIONAL: dict[str, pa.DataType] = {
    "score": pa.float32(),
    "order": pa.int32(),
    "step": pa.int32(),
    "position": pa.int32(),
    "token": pa.int32(),
    "kind": _LABEL,
    "image_id": _LABEL,
    "keep": _LABEL,
    "flip": _LABEL,
}


def check_trace(table: pd.DataFrame) -> None:
    """Raise `DartLabError` unless the table has every column of a trace and none that is unknown."""
    missing = [name for name in REQUIRED if name not in table.columns]
    if missing:
        raise DartLabError(f"not a trace: column {missing[0]!r} is missing; a trace has {', '.join(REQUIRED)}")
    for name in table.columns:
        if name not in REQUIRED and name not in OPTIONAL:
            raise DartLabError(f"not a trace: unknown column {name!r}. {did_you_mean(str(name), REQUIRED | OPTIONAL)}")


def trace_bytes(table: pd.DataFrame, facts: Mapping[str, Any]) -> bytes:
    """A trace as the bytes of a Parquet file: same rows and facts, same bytes.

    Args:
        table: one row a visual token, with the columns of `REQUIRED` and any of `OPTIONAL`.
        facts: what JSON can hold: provenance, budgets, results.

    Raises:
        DartLabError: a column is missing or unknown, a value does not fit its column, the facts are not JSON.
    """
    check_trace(table)
    types = {name: kind for name, kind in (REQUIRED | OPTIONAL).items() if name in table.columns}
    columns = [_column(table[name], kind) for name, kind in types.items()]
    return parquet_bytes(pa.Table.from_arrays(columns, schema=pa.schema(list(types.items()))), facts)


def save_trace(table: pd.DataFrame, path: str | Path, facts: Mapping[str, Any] | None = None) -> Path:
    """Write a trace to a Parquet file, the facts in its metadata; same data, same bytes.

    Args:
        table: as `Run.table()` gives it: one row a visual token.
        path: the file to write, by a temporary file beside it.
        facts: provenance and results, plain JSON values. Default none.

    Raises:
        DartLabError: see `trace_bytes`; or the file cannot be written.

    >>> import tempfile
    >>> table = pd.DataFrame({name: [0, 1] for name in REQUIRED}).assign(kept=[True, False], method="dart", stage="llm")
    >>> path = save_trace(table, Path(tempfile.mkdtemp()) / "trace.parquet", {"model": "tiny"})
    >>> again, facts = load_trace(path)
    >>> again["kept"].tolist(), facts
    ([True, False], {'model': 'tiny'})
    """
    return write_files({Path(path): trace_bytes(table, facts or {})})[0]


def load_trace(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read a trace and its facts.

    Returns:
        The table (labels as pandas categories, scores float32, counts int32) and the facts.

    Raises:
        DartLabError: no such file, not Parquet, or not a trace.
    """
    frame, facts = load_table(path)
    check_trace(frame)
    return frame, facts


def _column(values: pd.Series, kind: pa.DataType) -> pa.Array:
    """Values as one Arrow column; labels keep the order of their categories."""
    try:
        if kind == _LABEL:
            labels = values.astype("category")
            codes = pa.array(labels.cat.codes.to_numpy(), pa.int16(), mask=labels.isna().to_numpy())
            return pa.DictionaryArray.from_arrays(codes, pa.array([str(c) for c in labels.cat.categories], pa.string()))
        if pa.types.is_boolean(kind) and values.dtype != bool:
            raise DartLabError(f"column {values.name!r} of a trace must hold True or False, got {values.dtype}")
        return pa.array(values.to_numpy(), from_pandas=False).cast(kind, safe=not pa.types.is_floating(kind))
    except pa.ArrowException as error:
        raise DartLabError(f"column {values.name!r} of a trace does not fit {kind}: {error}") from error
