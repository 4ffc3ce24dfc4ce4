"""A reader of GGUF files: metadata, and tensors dequantised to float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dart_lab.errors import DartLabError

_MAGIC, _VERSION = b"GGUF", 3
_ALIGNMENT = 32  # bytes, where the metadata does not say
_BLOCK = 32  # weights that share a scale
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_1, _Q8_0 = 0, 1, 3, 8
_BLOCK_BYTES = {_Q4_1: 4 + _BLOCK // 2, _Q8_0: 2 + _BLOCK}
_PLAIN = {_F32: "<f4", _F16: "<f2"}


@dataclass(frozen=True)
class Gguf:
    """A model in one file.

    Attributes:
        metadata: values by key, as Python's own types; arrays are lists.
        tensors: float32 arrays by name, rows first.
    """

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


class _Cursor:
    """Reads values from a place that moves on."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, kind: int) -> Any:
        if kind == _STRING:
            length = self.take(10)
            return self.cut(length).decode("utf-8")
        if kind == _ARRAY:
            inner, length = self.take(4), self.take(10)
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner])
                return np.frombuffer(self.cut(length * dtype.itemsize), dtype=dtype).tolist()
            return [self.take(inner) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.cut(dtype.itemsize), dtype=dtype)[0].item()

    def cut(self, length: int) -> bytes:
        if self.at + length > len(self.content):
            raise ValueError("it ends too early")
        self.at += length
        return self.content[self.at - length : self.at]


def read_gguf(content: bytes) -> Gguf:
    """Read a GGUF file of version 3 with tensors of type F32, F16, Q4_1 and Q8_0.

    Args:
        content: the bytes of the file.

    Raises:
        DartLabError: the bytes are no such file, end too early, or hold a tensor of another type.
    """
    cursor = _Cursor(content)
    try:
        magic, version = cursor.cut(4), cursor.take(4)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"it begins with {magic!r}, version {version}")
        tensors, pairs = cursor.take(10), cursor.take(10)
        metadata = {}
        for _ in range(pairs):
            key = cursor.take(_STRING)
            metadata[key] = cursor.take(cursor.take(4))
        directory = []
        for _ in range(tensors):
            name, rank = cursor.take(_STRING), cursor.take(4)
            shape = tuple(cursor.take(10) for _ in range(rank))[::-1]
            directory.append((name, shape, cursor.take(4), cursor.take(10)))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-cursor.at // alignment) * alignment
        return Gguf(metadata, {name: _tensor(cursor, start + at, shape, kind) for name, shape, kind, at in directory})
    except (ValueError, UnicodeDecodeError) as error:
        raise DartLabError(f"the GGUF file cannot be read ({error}); fetch it again") from error


def _tensor(cursor: _Cursor, at: int, shape: tuple[int, ...], kind: int) -> np.ndarray:
    cursor.at = at
    size = int(np.prod(shape, dtype=np.int64))
    if kind in _PLAIN:
        dtype = np.dtype(_PLAIN[kind])
        return np.frombuffer(cursor.cut(size * dtype.itemsize), dtype=dtype).astype(np.float32).reshape(shape)
    if kind not in _BLOCK_BYTES or size % _BLOCK:
        raise ValueError(f"a tensor of type {kind} and shape {shape}")
    width = _BLOCK_BYTES[kind]
    blocks = np.frombuffer(cursor.cut(size // _BLOCK * width), dtype=np.uint8).reshape(-1, width)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == _Q8_0:
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
    least = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    halves = blocks[:, 4:]
    steps = np.concatenate([halves & 15, halves >> 4], axis=1)  # the low halves are the first 16 weights
    return (scale * steps + least).astype(np.float32).reshape(shape)
