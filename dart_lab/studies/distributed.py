"""Cells of a study on many GPUs or machines by Ray (extra `ray`): actors that load the model once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dart_lab.errors import DartLabError
from dart_lab.studies.cells import Cell, CellRunner, Result
from dart_lab.studies.plan import Study

RETRIES = 3  # how often a cell may lose its worker
WITHOUT_GPU = 2  # workers where the cluster has no GPU


def run_with_ray(study: Study, left: Sequence[Cell], workers: int | None = None) -> Iterator[Result]:
    """Spread cells over a Ray cluster: the one that is connected or named by `RAY_ADDRESS`, else this machine.

    A worker that is lost gives its cell back, and a new one is started in its place.

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
    kind = ray.remote(num_gpus=1 if gpus else 0, num_cpus=1, max_restarts=0)(CellRunner)
    lost = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
    waiting, tries = list(reversed(left)), dict.fromkeys((cell.number for cell in left), 0)
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
            give(kind.remote(study))
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
                waiting.append(cell)
                give(kind.remote(study))
                continue
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, DartLabError) else error from None
            give(actor)  # it goes on while the result is written
            yield result
    finally:
        for actor, _ in running.values():
            ray.kill(actor)
