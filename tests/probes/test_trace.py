"""A trace comes back as it was written, twice the same bytes, or not at all."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart_lab.errors import DartLabError, StorageError
from dart_lab.files import check_writable, write_files, write_somewhere
from dart_lab.probes.trace import OPTIONAL, REQUIRED, load_trace, save_trace, trace_bytes


def a_trace(rows: int = 6, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({name: rng.integers(-1, 1000, rows) for name in REQUIRED})
    table["kept"] = rng.random(rows) < 0.5
    table["method"] = pd.Categorical(rng.choice(["fastv", "dart"], rows), categories=["fastv", "dart"])
    table["stage"] = "LLM_LAYER"
    table["score"] = rng.normal(size=rows).astype(np.float32)
    table.loc[0, "score"] = np.nan
    return table


def test_values_types_and_facts_come_back(tmp_path: Path) -> None:
    table, facts = a_trace(), {"model": "tiny", "asked": [64, 0.25], "nested": {"ü": None}}
    again, read = load_trace(save_trace(table, tmp_path / "deep" / "t.parquet", facts))
    assert read == facts
    assert again["score"].dtype == np.float32 and again["sample"].dtype == np.int32 and again["kept"].dtype == bool
    assert list(again["method"].cat.categories) == ["fastv", "dart"], "the order of labels is kept, not sorted"
    for name in table.columns:
        expected, got = table[name].tolist(), again[name].tolist()
        assert all(a == b or (a != a and b != b) for a, b in zip(expected, got, strict=True)), name


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 5), st.permutations([*REQUIRED, "score"]))
def test_same_data_same_bytes_whatever_the_order_of_columns(rows: int, seed: int, order: list[str]) -> None:
    table = a_trace(rows, seed)
    assert trace_bytes(table, {"a": 1}) == trace_bytes(table[order].copy(), {"a": 1})


def test_other_data_or_facts_give_other_bytes() -> None:
    table = a_trace()
    flipped = table.assign(kept=~table["kept"])
    assert len({trace_bytes(table, {}), trace_bytes(flipped, {}), trace_bytes(table, {"seed": 1})}) == 3


def test_a_loaded_trace_saved_again_is_the_same_file(tmp_path: Path) -> None:
    first = save_trace(a_trace(), tmp_path / "a.parquet", {"n": 3})
    second = save_trace(*_swap(load_trace(first), tmp_path / "b.parquet"))
    assert first.read_bytes() == second.read_bytes()


def _swap(loaded: tuple, path: Path) -> tuple:
    table, facts = loaded
    return table, path, facts


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.drop(columns="kept"), "column 'kept' is missing"),
        (lambda t: t.assign(socre=1.0), "unknown column 'socre'. Did you mean 'score'?"),
        (lambda t: t.assign(kept=t["kept"].astype(int)), "must hold True or False"),
        (lambda t: t.assign(sample=2**40), "'sample' of a trace does not fit int32"),
        (lambda t: t.assign(row=0.5), "'row' of a trace does not fit int32"),
        (lambda t: t.assign(layer="two"), "'layer' of a trace does not fit int32"),
    ],
)
def test_what_is_no_trace_is_refused(change, says: str, tmp_path: Path) -> None:
    with pytest.raises(DartLabError, match="trace") as error:
        save_trace(change(a_trace()), tmp_path / "t.parquet")
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": object()}, {"x": np.float32(1)}])
def test_facts_must_be_plain_json(facts: dict) -> None:
    with pytest.raises(DartLabError, match="plain JSON"):
        trace_bytes(a_trace(), facts)


def test_reading_what_is_not_there_or_no_parquet(tmp_path: Path) -> None:
    with pytest.raises(DartLabError, match="no such file"):
        load_trace(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(DartLabError, match="no readable Parquet file"):
        load_trace(tmp_path / "text.parquet")
    with pytest.raises(DartLabError, match="no readable Parquet file"):
        cut = tmp_path / "cut.parquet"
        cut.write_bytes(trace_bytes(a_trace(), {})[:-20])
        load_trace(cut)
    other = tmp_path / "other.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(other)
    with pytest.raises(DartLabError, match="column 'sample' is missing"):
        load_trace(other)


def test_required_and_optional_columns_are_distinct() -> None:
    assert not set(REQUIRED) & set(OPTIONAL)


def test_all_files_are_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "a"
    old.write_bytes(b"old")
    real = Path.write_bytes

    def full_disk(self: Path, data: bytes) -> int:
        if ".b." in self.name:
            real(self, data[:1])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(DartLabError, match="No space left on device"):
        write_files({old: b"new", tmp_path / "b": b"bb"})
    assert old.read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_in_the_way_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(DartLabError, match=r"b is a folder"):
        write_files({tmp_path / "a": b"new", tmp_path / "b": b"bb"})
    assert (tmp_path / "a").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


def test_what_was_computed_is_written_elsewhere_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, rescue = tmp_path / "full", tmp_path / "tmp"
    rescue.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(rescue))
    real = Path.write_bytes

    def write(self: Path, data: bytes) -> int:
        if full in self.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(StorageError, match=r"No space left .* were written to") as caught:
        write_somewhere({full / "a": b"one", full / "b": b"two"})
    elsewhere = Path(str(caught.value).rpartition("written to ")[2].removesuffix(" instead"))
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == {"a": b"one", "b": b"two"}
    assert not list(full.iterdir())


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DartLabError, match="is a file"):
        check_writable(tmp_path / "file" / "below")
    with pytest.raises(DartLabError, match="cannot be written"):
        write_files({tmp_path / "file" / "below" / "x": b""})
    check_writable(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists(), "checking leaves no trace"
