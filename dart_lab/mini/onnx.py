"""The weights in an ONNX file: a reader of the few fields of its protobuf that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dart_lab.errors import DartLabError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATION = 1, 2, 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 8, 9
_FLOAT = 1  # ONNX's number of the element type float32


@dataclass(frozen=True)
class OnnxWeights:
    """What a graph holds: named float32 arrays, and the names of linear maps whose matrices have no name of their own.

    Attributes:
        tensors: initializers by name; other element types than float32 are left out.
        matrices: name of a bias, without ``.bias`` → name of the matrix in ``tensors`` that multiplies before it.
    """

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    matrices: dict[str, str] = field(default_factory=dict)


def read_onnx(content: bytes) -> OnnxWeights:
    """Read the weights of an ONNX model.

    Args:
        content: the bytes of the file.

    Raises:
        DartLabError: the bytes end too early or are no ONNX model.
    """
    view = memoryview(content)
    found = OnnxWeights()
    nodes: list[tuple[str, list[str], list[str]]] = []
    try:
        for number, graph in _fields(view):
            if number != _MODEL_GRAPH or isinstance(graph, int):
                continue
            for kind, part in _fields(graph):
                if isinstance(part, int):
                    continue
                if kind == _GRAPH_INITIALIZER:
                    _read_tensor(part, found.tensors)
                elif kind == _GRAPH_NODE:
                    nodes.append(_read_node(part))
    except (IndexError, UnicodeDecodeError, ValueError) as error:
        raise DartLabError(f"the ONNX file is damaged ({error}); fetch it again") from error
    if not found.tensors:
        raise DartLabError("the ONNX file holds no weights; fetch it again")
    products = {
        output: next((name for name in inputs if name in found.tensors), "")
        for operation, inputs, outputs in nodes
        if operation == "MatMul"
        for output in outputs
    }
    for operation, inputs, _ in nodes:
        if operation == "Add" and len(inputs) == 2:
            for bias, product in (inputs, inputs[::-1]):
                if bias.endswith(".bias") and products.get(product):
                    found.matrices[bias.removesuffix(".bias")] = products[product]
    return found


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = view[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and content of every field of a message."""
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(view, at)
            yield number, value
            continue
        if wire == _BYTES:
            length, at = _varint(view, at)
        elif wire in _FIXED_BYTES:
            length = _FIXED_BYTES[wire]
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(view):
            raise ValueError("it ends too early")
        yield number, view[at : at + length]
        at += length


def _text(part: int | memoryview) -> str:
    return "" if isinstance(part, int) else bytes(part).decode("utf-8")


def _read_node(view: memoryview) -> tuple[str, list[str], list[str]]:
    """Operation, inputs and outputs of one node."""
    parts = list(_fields(view))
    operation = next((_text(part) for number, part in parts if number == _NODE_OPERATION), "")
    inputs = [_text(part) for number, part in parts if number == _NODE_INPUT]
    return operation, inputs, [_text(part) for number, part in parts if number == _NODE_OUTPUT]


def _read_tensor(view: memoryview, tensors: dict[str, np.ndarray]) -> None:
    dims: list[int] = []
    name, kind, raw = "", 0, memoryview(b"")
    for number, part in _fields(view):
        if number == _TENSOR_DIMS:
            dims += [part] if isinstance(part, int) else _packed(part)
        elif number == _TENSOR_TYPE and isinstance(part, int):
            kind = part
        elif number == _TENSOR_NAME:
            name = _text(part)
        elif number == _TENSOR_RAW and not isinstance(part, int):
            raw = part
    if kind == _FLOAT:
        tensors[name] = np.frombuffer(raw, dtype="<f4").reshape(dims).copy()


def _packed(view: memoryview) -> list[int]:
    numbers, at = [], 0
    while at < len(view):
        number, at = _varint(view, at)
        numbers.append(number)
    return numbers
