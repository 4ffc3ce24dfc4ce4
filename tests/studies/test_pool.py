"""The pool of workers without Ray: a stand-in loses workers on purpose, and every lost one is replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dart_lab.errors import DartLabError
from dart_lab.studies.cells import Cell
from dart_lab.studies.distributed import RETRIES, run_with_ray
from dart_lab.studies.plan import Grid, Study, TaskSpec

TASK = TaskSpec(name="shapes", n=9)
STUDY = Study(tasks=(TASK,), grids=(Grid(text=("dart:4",)),), batch_size=1)
CELLS = [Cell(number, "tiny", TASK, number, number + 1) for number in range(9)]


class Lost(Exception):
    """What Ray raises for a worker that is gone."""


class Failed(Exception):
    """What Ray raises for an error inside a worker; `cause` is that error."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Pool(ModuleType):
    """The part of Ray that is used. `breaks(cell, attempt)` says whether a cell takes its worker with it.

    Workers answer in the order in which they were given something; `alive` counts them after each answer.
    """

    def __init__(self, breaks: Callable[[int, int], bool]) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(
            RayActorError=Lost, NodeDiedError=Lost, WorkerCrashedError=Lost, RayTaskError=Failed
        )
        self.breaks = breaks
        self.made = 0
        self.living: set[int] = set()
        self.alive: list[int] = []
        self.attempts: dict[int, int] = {}
        self.given: list[int] = []

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def remote(self, **_: Any) -> Any:
        return lambda kind: SimpleNamespace(remote=self._start)

    def _start(self, study: Study) -> Any:
        assert study is STUDY
        self.made += 1
        self.living.add(self.made)
        number = self.made
        return SimpleNamespace(number=number, run=SimpleNamespace(remote=lambda cell: (number, cell.number)))

    def wait(self, running: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return running[:num_returns], running[num_returns:]

    def get(self, reference: tuple[int, int]) -> tuple[int, str, dict[str, float], dict[str, Any]]:
        worker, cell = reference
        assert worker in self.living, "work was given to a worker that is gone"
        attempt = self.attempts[cell] = self.attempts.get(cell, 0) + 1
        if self.breaks(cell, attempt):
            self.living.discard(worker)
            raise Lost
        self.alive.append(len(self.living))
        return cell, "records", {}, {}

    def kill(self, actor: Any) -> None:
        self.living.discard(actor.number)


def pool(monkeypatch: pytest.MonkeyPatch, breaks: Callable[[int, int], bool]) -> Pool:
    made = Pool(breaks)
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def test_every_lost_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(monkeypatch, lambda cell, attempt: cell in (0, 1, 2, 5) and attempt == 1)
    done = [number for number, *_ in run_with_ray(STUDY, CELLS, workers=3)]
    assert sorted(done) == list(range(9)) and len(set(done)) == 9
    assert made.made == 3 + 4 and not made.living
    assert made.alive[: len(CELLS) - 2] == [3] * (len(CELLS) - 2)  # full strength while there is work for three


def test_a_cell_that_takes_every_worker_with_it_stops_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(monkeypatch, lambda cell, attempt: cell == 4)
    with pytest.raises(DartLabError, match=f"block 4 lost its worker {RETRIES + 1} times"):
        list(run_with_ray(STUDY, CELLS, workers=2))
    assert made.attempts[4] == RETRIES + 1 and not made.living


def test_no_worker_is_left_when_the_reader_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(monkeypatch, lambda cell, attempt: False)
    results = run_with_ray(STUDY, CELLS, workers=3)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert not made.living
