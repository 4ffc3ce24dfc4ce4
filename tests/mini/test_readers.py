"""The readers of ONNX and GGUF against files written by the formats' rules."""

from __future__ import annotations

import numpy as np
import pytest

from dart_lab.errors import DartLabError
from dart_lab.mini.gguf import read_gguf
from dart_lab.mini.onnx import read_onnx
from tests.mini.files import gguf_file, message, onnx_file, onnx_tensor, quantised

A = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)


def test_onnx_tensors_come_back_bit_for_bit() -> None:
    vector = np.arange(300, dtype=np.float32)
    nodes = [("MatMul", ["x", "m"], "y"), ("Add", ["y", "layer.bias"], "z"), ("Add", ["z", "other.bias"], "w")]
    weights = read_onnx(onnx_file({"m": A, "layer.bias": vector, "steps": np.arange(4)}, nodes))
    assert set(weights.tensors) == {"m", "layer.bias"}  # whole numbers are left out
    assert np.array_equal(weights.tensors["m"], A)
    assert np.array_equal(weights.tensors["layer.bias"], vector)
    assert weights.matrices == {"layer": "m"}


def test_onnx_shapes_may_be_packed() -> None:
    weights = read_onnx(message(7, message(5, onnx_tensor("m", A, packed=True))))
    assert np.array_equal(weights.tensors["m"], A)


@pytest.mark.parametrize("content", [b"", b"not an onnx file", onnx_file({"m": A}, [])[:-5], onnx_file({}, [])])
def test_a_damaged_onnx_file_is_refused(content: bytes) -> None:
    with pytest.raises(DartLabError, match="ONNX file"):
        read_onnx(content)


def by_hand(raw: bytes, kind: str) -> list[float]:
    """The formulas of the format, one weight after the other."""
    width, out = {"Q4_1": 20, "Q8_0": 34}[kind], []
    for at in range(0, len(raw), width):
        scale = float(np.frombuffer(raw[at : at + 2], "<f2")[0])
        if kind == "Q8_0":
            out += [scale * int(np.int8(np.uint8(byte))) for byte in raw[at + 2 : at + width]]
            continue
        least, bytes_ = float(np.frombuffer(raw[at + 2 : at + 4], "<f2")[0]), raw[at + 4 : at + width]
        out += [scale * (byte % 16) + least for byte in bytes_] + [scale * (byte // 16) + least for byte in bytes_]
    return out


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_1", "Q8_0"])
def test_gguf_tensors_are_dequantised_by_the_format_s_formulas(kind: str) -> None:
    found = read_gguf(gguf_file({"a": 1}, {"first": (A[:1, :32], "F32"), "m": (A, kind)})).tensors
    raw = quantised(A, kind)
    expected = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[kind]) if kind[0] == "F" else by_hand(raw, kind)
    assert found["m"].dtype == np.float32
    assert found["m"].shape == A.shape
    assert np.array_equal(found["first"], A[:1, :32])
    np.testing.assert_allclose(found["m"].ravel(), np.array(expected, dtype=np.float32), rtol=2e-7, atol=1e-7)
    assert np.abs(found["m"] - A).max() < {"F32": 1e-9, "F16": 2e-3, "Q4_1": 0.2, "Q8_0": 0.02}[kind]


def test_gguf_metadata_keeps_its_types() -> None:
    metadata = {"text": "ä", "list": ["a", "bc"], "numbers": [3, -1], "yes": True, "count": 7, "part": 0.5}
    assert read_gguf(gguf_file(metadata, {})).metadata == metadata


def test_a_gguf_file_that_cannot_be_read_is_refused() -> None:
    whole = gguf_file({"a": "b"}, {"m": (A, "Q8_0")})
    for content in (b"", b"PK" + whole, whole[:40], whole[:-40], whole[:4] + b"\x02" + whole[5:]):
        with pytest.raises(DartLabError, match="GGUF file"):
            read_gguf(content)
    kind = whole.index(b"m" + (2).to_bytes(4, "little")) + 1 + 4 + 16
    with pytest.raises(DartLabError, match="type 2"):
        read_gguf(whole[:kind] + b"\x02" + whole[kind + 1 :])
