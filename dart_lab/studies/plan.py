"""What a study is: conditions × samples, as a small typed object and as a TOML file."""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from dart_lab.errors import DartLabError, check_whole, did_you_mean
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.registry import make_pruner
from dart_lab.pruners.text import parse_pruner

UNPRUNED, NONE_KEPT = "unpruned", "none kept"
#: Wrappers that a grid may put around its method: name → class in `dart_lab.pruners`.
WRAPPERS: Mapping[str, str] = MappingProxyType({"windowed": "Windowed", "protect": "Protect"})

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task by its name, or a folder, with what `load_task` takes."""

    name: str
    n: int | None = None
    seed: int = 0
    families: tuple[str, ...] | None = None
    questions_per_image: int = 1

    @property
    def label(self) -> str:
        """Name, and the families if they are chosen.

        >>> TaskSpec(name="shapes", families=("exist",)).label
        'shapes exist'
        """
        return " ".join([self.name, *(self.families or ())])


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination of the values of a method's parameters, or methods as text.

    Args:
        method: a registered name; or
        text: methods as `parse_pruner` reads them, such as "2:fastv:0.5;8:dart:0.25".
        parameters: name → values.
        wrapper: "windowed" or "protect", put around every one of them.
        wrapper_parameters: name → values of the wrapper's parameters.

    >>> list(Grid(method="alpha", parameters={"alpha": (0.0, 1.0), "keep": (64,)}).conditions())
    ['alpha alpha=0.0 keep=64', 'alpha alpha=1.0 keep=64']
    """

    method: str | None = None
    text: tuple[str, ...] = ()
    parameters: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    wrapper: str | None = None
    wrapper_parameters: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def conditions(self) -> dict[str, Pruner]:
        """Label → method. Raises `DartLabError` for unknown names and values out of range."""
        if (self.method is None) == (not self.text):
            raise DartLabError("a grid of conditions needs either method or text; give one of the two")
        plain = [(text, parse_pruner(text)) for text in self.text]
        if self.method is not None:
            plain = [
                (" ".join([self.method, *words]), make_pruner(self.method, **values))
                for words, values in _combinations(self.parameters)
            ]
        elif self.parameters:
            raise DartLabError("parameters go with method; write them into the text, as in fastv:0.5:layer=3")
        if self.wrapper is not None:
            wrap = _wrapper(self.wrapper, self.wrapper_parameters)
            plain = [
                (" ".join([f"{self.wrapper}({label})", *words]), wrap(pruner, **values))
                for label, pruner in plain
                for words, values in _combinations(self.wrapper_parameters)
            ]
        return _unique(plain)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Models × tasks × conditions.

    Args:
        tasks: what is asked.
        grids: what is compared. The unpruned model and none kept are always added.
        models: names as `load` takes them. Default: tiny.
        max_new_tokens: length at which an answer is cut. Default 16.
        batch_size: samples that run together, and are written together. Default 8.
        layer: before which "none kept" drops everything. Default 2.
        without_baseline: why the study has no unpruned and no none-kept condition. Default: it has them.

    Raises:
        DartLabError: no task, no condition, two conditions of one name, a number out of range.
    """

    tasks: tuple[TaskSpec, ...]
    grids: tuple[Grid, ...] = ()
    models: tuple[str, ...] = ("tiny",)
    max_new_tokens: int = 16
    batch_size: int = 8
    layer: int = 2
    without_baseline: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks or not self.models:
            raise DartLabError("a study needs at least one task and one model")
        for name in ("max_new_tokens", "batch_size", "layer"):
            check_whole(name, getattr(self, name), least=1)
        if self.without_baseline is not None and not self.without_baseline.strip():
            raise DartLabError("without_baseline: say why the study can do without, in words")
        labels = [task.label for task in self.tasks]
        if len(set(labels)) != len(labels) or len(set(self.models)) != len(self.models):
            raise DartLabError("a task or a model is named twice; name each once")
        self.conditions()

    def conditions(self) -> dict[str, Pruner | None]:
        """Label → method, None for the unpruned model; in a fixed order."""
        found: list[tuple[str, Pruner | None]] = []
        if self.without_baseline is None:
            found = [(UNPRUNED, None), (NONE_KEPT, make_pruner("none-kept", layer=self.layer))]
        out = _unique([*found, *(item for grid in self.grids for item in grid.conditions().items())])
        if not out:
            raise DartLabError("a study needs at least one condition, for example [[conditions]] method = 'dart'")
        return out

    def as_dict(self) -> dict[str, Any]:
        """The study as plain values, which `study_from` reads again."""
        plain = asdict(self)
        plain["conditions"] = plain.pop("grids")
        return json.loads(json.dumps(plain))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plain values: two studies of one fingerprint ask the same."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


def read_study(path: str | Path) -> Study:
    """Read a TOML file.

    Top level: `model` or `models`, `layer`, `max_new_tokens`, `batch_size`, `without_baseline`; `[[tasks]]` with
    `name`, `n`, `seed`, `families`, `questions_per_image`; `[[conditions]]` with `method` and any of its parameters, a
    list being several values (a pair is a list in the list), or `text`; `wrapper` and
    `[conditions.wrapper_parameters]`.

    Raises:
        DartLabError: no such file, not TOML, an unknown key (with the nearest right one), or as `Study`.
    """
    try:
        with Path(path).open("rb") as file:
            plain = tomllib.load(file)
    except OSError as error:
        raise DartLabError(f"{path} cannot be read ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DartLabError(f"{path} is not TOML: {error}") from error
    if "model" in plain and "models" not in plain:
        plain["models"] = plain.pop("model")
    for grid in _tables(plain, "conditions"):
        own = {f.name for f in fields(Grid)}
        stray = {key: grid.pop(key) for key in [key for key in grid if key not in own]}
        if stray:
            grid["parameters"] = {**grid.get("parameters", {}), **stray}
    return study_from(plain, str(path))


def study_from(plain: Mapping[str, Any], where: str = "study") -> Study:
    """A study from plain values, as `Study.as_dict` gives them. Raises `DartLabError` for unknown keys."""
    known = {f.name for f in fields(Study)} - {"grids"} | {"conditions"}
    _check_keys(plain, known, where)
    tasks = tuple(_task(task, where) for task in _tables(plain, "tasks"))
    grids = tuple(_grid(grid, where) for grid in _tables(plain, "conditions"))
    rest = {key: value for key, value in plain.items() if key not in ("tasks", "conditions")}
    if "models" in rest:
        rest["models"] = _many(rest["models"])
    return Study(tasks=tasks, grids=grids, **rest)


def _task(plain: Mapping[str, Any], where: str) -> TaskSpec:
    _check_keys(plain, {f.name for f in fields(TaskSpec)}, f"{where}, a task")
    if "name" not in plain:
        raise DartLabError(f"{where}: a task has no name; write name = 'shapes', or the path of a folder")
    families = plain.get("families")
    return TaskSpec(**{**plain, "families": None if families is None else _many(families)})


def _grid(plain: Mapping[str, Any], where: str) -> Grid:
    _check_keys(plain, {f.name for f in fields(Grid)}, f"{where}, conditions")
    values = dict(plain)
    for name in ("parameters", "wrapper_parameters"):
        values[name] = {key: _many(value) for key, value in dict(values.get(name) or {}).items()}
    values["text"] = _many(values.get("text") or ())
    return Grid(**values)


def _many(value: Any) -> tuple[Any, ...]:
    """A list as values, anything else as one; lists within become tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(tuple(one) if isinstance(one, list) else one for one in value)
    return (value,)


def _tables(plain: Mapping[str, Any], name: str) -> Sequence[dict[str, Any]]:
    found = plain.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DartLabError(f"{name} must be tables: write [[{name}]] above each")
    return found


def _check_keys(plain: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in plain:
        if key not in known:
            raise DartLabError(f"{where}: unknown key {key!r}. {did_you_mean(key, known)}")


def _combinations(parameters: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Every combination of values, with its words `name=value`."""
    for values in itertools.product(*parameters.values()):
        chosen = dict(zip(parameters, values, strict=True))
        yield [f"{name}={_word(value)}" for name, value in chosen.items()], chosen


def _word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _wrapper(name: str, parameters: Mapping[str, Any]) -> Any:
    """A wrapper's class, if it has such parameters."""
    import dart_lab.pruners

    if name not in WRAPPERS:
        raise DartLabError(f"unknown wrapper {name!r}. {did_you_mean(name, WRAPPERS)}")
    found = getattr(dart_lab.pruners, WRAPPERS[name])
    _check_keys(parameters, {f.name for f in fields(found) if f.init} - {"pruner"}, f"wrapper {name}")
    return found


def _unique(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Label → value. Raises `DartLabError` for a label that is there twice."""
    out: dict[str, T] = {}
    for label, value in items:
        if label in out:
            raise DartLabError(f"condition {label!r} is there twice; name each once")
        out[label] = value
    return out
