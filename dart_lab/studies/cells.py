"""A cell is what runs and is written together: one model, one task, one block of samples, every condition."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.studies.answering import record_of
from dart_lab.studies.branch import Branch, branch
from dart_lab.studies.plan import Study, TaskSpec
from dart_lab.studies.store import SCHEMA
from dart_lab.tasks.base import Sample, Task, load_task

if TYPE_CHECKING:
    from dart_lab.vlm.vlm import VLM

TIE = 1e-3  # an answer whose first token leads by less may come out otherwise in another batch or precision
_MARGIN_DIGITS = 4  # margins are rounded, so that the size of a batch does not show in the bytes

Conditions = Mapping[str, Pruner | None]
#: What running a cell gives: its number, records, seconds, and where the model's numbers come from.
Result = tuple[int, pd.DataFrame, dict[str, float], dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """Samples `start` to `stop` of one task under one model."""

    number: int
    model: str
    task: TaskSpec
    start: int
    stop: int


def open_task(spec: TaskSpec) -> Task:
    """The task that a plan names."""
    return load_task(
        spec.name, n=spec.n, seed=spec.seed, families=spec.families, questions_per_image=spec.questions_per_image
    )


def cells(study: Study, tasks: Mapping[str, Task] | None = None) -> list[Cell]:
    """Every cell of a study, in the order of its records."""
    known = tasks or {task.label: open_task(task) for task in study.tasks}
    out: list[Cell] = []
    for model in study.models:
        for task in study.tasks:
            size = len(known[task.label])
            for start in range(0, size, study.batch_size):
                out.append(Cell(len(out), model, task, start, min(start + study.batch_size, size)))
    return out


class CellRunner:
    """Runs cells of one study, one after the other; keeps the model that ran last, and the tasks that are open.

    Args:
        study: whose cells they are.
        tasks: label → task, as far as they are open already. Default: none is.
    """

    def __init__(self, study: Study, tasks: Mapping[str, Task] | None = None) -> None:
        self._steps, self._conditions, self._tasks = study.max_new_tokens, study.conditions(), dict(tasks or {})
        self._name = ""
        self._vlm: VLM | None = None
        self._facts: dict[str, Any] = {}

    def run(self, cell: Cell) -> Result:
        """Records of a cell; its model is loaded if another one, or none, ran before."""
        from dart_lab.vlm.load import load

        if self._vlm is None or self._name != cell.model:
            self._vlm = None  # the old one goes before the new one comes
            self._name, self._vlm = cell.model, load(cell.model)
            self._facts = {**self._vlm.provenance(), "studied_as": cell.model}
        if cell.task.label not in self._tasks:
            self._tasks[cell.task.label] = open_task(cell.task)
        records, seconds = run_cell(
            self._vlm, self._tasks[cell.task.label], cell, self._conditions, max_new_tokens=self._steps
        )
        return cell.number, records, seconds, self._facts


def run_cell(
    vlm: Any, task: Task, cell: Cell, conditions: Conditions, *, max_new_tokens: int
) -> tuple[pd.DataFrame, dict[str, float]]:
    """Records of a cell, and the seconds it took.

    A sample that cannot be answered is recorded with the reason; the others go on. Out of memory halves the batch, then
    the conditions.
    """
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = []
    samples: list[Sample] = []
    ids: list[str] = []
    for index in range(cell.start, cell.stop):
        try:
            samples.append(task[index])
            ids.append(samples[-1].id)
        except (DartLabError, OSError, ValueError) as error:  # a picture that cannot be read
            ids.append(f"{task.name}-{index}")
            gone = Sample(ids[-1], None, "", "", "", image_id=ids[-1])  # type: ignore[arg-type]
            rows += _failures([gone], conditions, f"the sample cannot be read: {_line(error)}")
    prepared = time.perf_counter()
    if samples:
        rows += _answer(vlm, samples, conditions, max_new_tokens)
    names = list(conditions)
    rows.sort(key=lambda row: (ids.index(row["sample"]), names.index(row["condition"])))
    table = pd.DataFrame(rows, columns=SCHEMA.names).assign(model=cell.model, task=cell.task.label)
    seconds = {"read": prepared - begun, "answer": time.perf_counter() - prepared}
    return table, seconds


def _answer(vlm: Any, samples: Sequence[Sample], conditions: Conditions, steps: int) -> list[dict[str, Any]]:
    """Rows of several samples; whatever goes wrong is narrowed down to the sample and condition that it belongs to."""
    try:
        inputs = vlm.prepare([sample.image for sample in samples], [sample.question for sample in samples])
        found = branch(vlm, inputs, list(conditions.values()), max_new_tokens=steps)
    except (DartLabError, MemoryError, RuntimeError, ValueError) as error:
        if "CUDA error" in str(error) and not _out_of_memory(error):
            raise  # a device that failed once answers nothing after it
        _free()
        halves = _halves(samples, conditions)
        if not halves:
            reason = "out of memory with one sample and one condition" if _out_of_memory(error) else _line(error)
            return _failures(samples, conditions, reason)
        return [row for some, few in halves for row in _answer(vlm, some, few, steps)]
    return [
        row
        for (name, _), one in zip(conditions.items(), found, strict=True)
        for row in _rows(samples, name, one, vlm.words(one.tokens), vlm.depth)
    ]


def _halves(samples: Sequence[Sample], conditions: Conditions) -> list[tuple[Sequence[Sample], Conditions]]:
    """The same work in two pieces: fewer samples, or, of one sample, fewer conditions; nothing if there is one each."""
    if len(samples) > 1:
        middle = len(samples) // 2
        return [(samples[:middle], conditions), (samples[middle:], conditions)]
    if len(conditions) > 1:
        items = list(conditions.items())
        middle = len(items) // 2
        return [(samples, dict(items[:middle])), (samples, dict(items[middle:]))]
    return []


def _rows(samples: Sequence[Sample], name: str, one: Branch, texts: list[str], depth: int) -> list[dict[str, Any]]:
    rows = []
    for number, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        margin = float(one.margin[number])
        if margin != margin:
            rows += _failures([sample], {name: None}, "the model's logits are NaN")
            continue
        rows.append(
            {
                **record_of(sample, name, text, one, number, depth),
                "shared": one.shared,
                "reason": one.reason,
                "margin": round(margin, _MARGIN_DIGITS),
                "tie_sensitive": margin < TIE,
                "failure": None,
            }
        )
    return rows


def _failures(samples: Sequence[Sample], conditions: Conditions, reason: str) -> list[dict[str, Any]]:
    blank = dict.fromkeys(SCHEMA.names)
    return [{**blank, **_named(sample, name), "failure": reason} for sample in samples for name in conditions]


def _named(sample: Sample, condition: str) -> dict[str, Any]:
    return {
        "condition": condition, "sample": sample.id, "image_id": sample.image_id or sample.id,
        "family": sample.family, "question": sample.question, "answer": sample.answer,
    }  # fmt: skip


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "out of memory" in str(error).lower()


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
