"""Cells of a study on many GPUs or machines by Ray (extra `ray`): actors that load the model once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dart_lab.errors import DartLabError
from dart_lab.studies.cells import Cell, open_task, run_cell
from dart_lab.studies.plan import Study, study_from

RETRIES = 3  # how often a cell may lose its worker
WITHOUT_GPU = 2  # workers where the cluster has no GPU


class Worker:
    """Runs cells of one study; keeps the model and the tasks that it has opened."""

    def __init__(self, study: dict[str, Any]) -> None:
        self.study = study_from(study)
        self.conditions = self.study.conditions()
        self.tasks: dict[str, Any] = {}
        self.name = ""
        self.vlm: Any = None
        self.facts: dict[str, Any] = {}

    def run(self, cell: Cell) -> tuple[int, Any, dict[str, float], dict[str, Any]]:
        """One cell, as `run_here` gives it."""
        from dart_lab.vlm.load import load

        if self.vlm is None or self.name != cell.model:
            self.name, self.vlm = cell.model, load(cell.model)
            self.facts = {**self.vlm.provenance(), "studied_as": self.name}
        if cell.task.label not in self.tasks:
            self.tasks[cell.task.label] = open_task(cell.task)
        task, steps = self.tasks[cell.task.label], self.study.max_new_tokens
        records, seconds = run_cell(self.vlm, task, cell, self.conditions, max_new_tokens=steps)
        return cell.number, records, seconds, self.facts


def run_with_ray(study: Study, left: Sequence[Cell], workers: int | None = None) -> Iterator[Any]:
    """Spread cells over a Ray cluster: the one that is connected or named by `RAY_ADDRESS`, else this machine.

    A worker that is lost gives its cell back; another one takes it over.

    Args:
        study: what is run.
        left: its cells that are not done.
        workers: how many. Default: one a GPU of the cluster, or 2 where there is none.

    Yields:
        A result a cell, in the order in which they are done.

    Raises:
        DartLabError: Ray is not installed, a number of workers below 1, or a cell that loses its worker again and
            again.
    """
    try:
        import ray
    except ImportError as error:
        raise DartLabError("--executor ray needs Ray; install it with: pip install 'dart-lab[ray]'") from error
    if workers is not None and workers < 1:
        raise DartLabError(f"workers={workers}: give at least 1")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    number = min(workers or gpus or WITHOUT_GPU, len(left))
    kind = ray.remote(num_gpus=1 if gpus else 0, num_cpus=1, max_restarts=0)(Worker)
    lost = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
    plain, waiting, tries = study.as_dict(), list(reversed(left)), dict.fromkeys((cell.number for cell in left), 0)
    running: dict[Any, tuple[Any, Cell]] = {}

    def give(actor: Any) -> None:
        """The next cell, or, if none is left, the resources back."""
        if waiting:
            cell = waiting.pop()
            running[actor.run.remote(cell)] = (actor, cell)
        else:
            ray.kill(actor)

    try:
        for _ in range(number):
            give(kind.remote(plain))
        while running:
            ready, _ = ray.wait(list(running), num_returns=1)
            actor, cell = running.pop(ready[0])
            try:
                result = ray.get(ready[0])
            except lost as error:
                tries[cell.number] += 1
                if tries[cell.number] > RETRIES:
                    raise DartLabError(
                        f"block {cell.number} lost its worker {tries[cell.number]} times; look at the nodes' memory"
                    ) from error
                waiting.append(cell)  # whoever is free next takes it
                if not running:
                    give(kind.remote(plain))
                continue
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, DartLabError) else error from None
            yield result
            give(actor)
    finally:
        for actor, _ in running.values():
            ray.kill(actor)
