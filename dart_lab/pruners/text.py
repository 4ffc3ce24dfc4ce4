"""Methods as text, as the command line and records write them."""

from __future__ import annotations

import re
from typing import Any

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.registry import make_pruner

_FORM = "NAME, NAME:KEEP or NAME:KEEP:PARAMETER=VALUE,…, such as fastv:0.5 or dart:64:image_pivots=2,text_pivots=2"
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def parse_pruner(text: str, **defaults: Any) -> Pruner:
    """Build a method, or a `Schedule`, from text.

    Args:
        text: `NAME`, `NAME:KEEP`, `NAME:PARAMETER=VALUE,…` or `NAME:KEEP:PARAMETER=VALUE,…`; a schedule is
            `LAYER:METHOD;LAYER:METHOD;…`. Values are numbers, true, false, none, 4x4 (a pair) or words.
        defaults: parameters that hold where the text does not give them.

    Raises:
        DartLabError: text of another form, and whatever `make_pruner` refuses.

    >>> parse_pruner("window-fastv:144:windows=4x4").windows
    (4, 4)
    >>> parse_pruner("random", keep=16).keep
    16
    >>> [part.layer for part in parse_pruner("2:fastv:0.5;8:dart:0.25").parts()]
    [2, 8]
    """
    if re.match(r"\s*\d+\s*:", text):
        from dart_lab.pruners.schedule import Schedule

        return Schedule(parse_stages(text, **defaults))
    return _parse_method(text, defaults)


def parse_stages(text: str, **defaults: Any) -> dict[int, Pruner]:
    """Read `LAYER:METHOD;LAYER:METHOD;…`. Raises `DartLabError` for text of another form and a layer given twice.

    >>> parse_stages("3:random:8")
    {3: Random(keep=8, layer=3, seed=0, budget='exact')}
    """
    stages: dict[int, Pruner] = {}
    for stage in text.split(";"):
        layer, _, method = stage.partition(":")
        if not layer.strip().isdecimal() or not method.strip():
            raise DartLabError(f"schedule: {stage.strip()!r} is not LAYER:METHOD; write 2:fastv:0.5;8:dart:0.25")
        if int(layer) in stages:
            raise DartLabError(f"schedule: layer {int(layer)} is given twice; layers must strictly increase")
        stages[int(layer)] = _parse_method(method, {**defaults, "layer": int(layer)})
    return stages


def _parse_method(text: str, defaults: dict[str, Any]) -> Pruner:
    name, *rest = (piece.strip() for piece in text.split(":"))
    given: dict[str, Any] = {}
    if rest and "=" not in rest[0]:
        given["keep"] = _number(rest.pop(0), text)
    if len(rest) > 1 or not name or rest == [""]:
        raise DartLabError(f"{text!r} is no method; write {_FORM}")
    for setting in rest[0].split(",") if rest else ():
        key, equals, value = (piece.strip() for piece in setting.partition("="))
        if not (key and equals and value):
            raise DartLabError(f"{text!r}: {setting!r} is not PARAMETER=VALUE; write {_FORM}")
        if key in given:
            raise DartLabError(f"{text!r}: {key} is given twice")
        given[key] = _value(value)
    return make_pruner(name, **{**defaults, **given})


def _number(text: str, whole: str) -> int | float:
    value = _value(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DartLabError(f"{whole!r}: {text!r} is no number of tokens and no ratio; write {_FORM}")
    return value


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    pair = re.fullmatch(r"(\d+)x(\d+)", text)
    if pair:
        return int(pair[1]), int(pair[2])
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
