"""Run a study into its folder: from the start, from where it was killed, on one machine or on many."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.studies.cells import Cell, CellRunner, Result, cells, open_task
from dart_lab.studies.plan import Study
from dart_lab.studies.store import Store
from dart_lab.tasks.base import Task

EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class Status:
    """How far a study is: `done` of `cells`, and how many records are failures."""

    done: int
    cells: int
    records: int
    failures: int


def run_study(
    study: Study,
    folder: str | Path,
    *,
    executor: str = "local",
    workers: int | None = None,
    part: tuple[int, int] = (0, 1),
    progress: bool | None = None,
) -> Path:
    """Run a study, or what is left of it, and put its records together.

    Killed anywhere and started again, it ends with the same bytes, whatever the executor and the number of workers.

    Args:
        study: what to run.
        folder: where to; a folder that holds the same study is gone on with.
        executor: "local", or "ray" (extra `ray`).
        workers: of Ray. Default: one a GPU of the cluster, or 2 where there is none.
        part: (i, k) runs every k-th cell from i on and leaves the rest to other machines; see `merge_folders`.
        progress: a bar on stderr. Default: on a terminal.

    Returns:
        The records; with `part`, the folder.

    Raises:
        DartLabError: the folder holds another study or is in use, the model or a version changed, the disk is full.
    """
    if executor not in EXECUTORS:
        raise DartLabError(f"unknown executor {executor!r}. {did_you_mean(executor, EXECUTORS)}")
    index, count = part
    if not 0 <= index < count:
        raise DartLabError(f"part {index + 1}/{count}: give a number from 1 to {count}")
    tasks = {spec.label: open_task(spec) for spec in study.tasks}
    store = Store.create(folder, study)
    with store.locked():
        everything = cells(study, tasks)
        left = [cell for cell in everything[index::count] if not store.has(cell.number)]
        if left:
            _execute(store, study, left, tasks, executor, workers, progress)
        return store.merge(len(everything)) if count == 1 else store.folder


def resume_study(folder: str | Path, **options: Any) -> Path:
    """Go on with the study of a folder. Arguments and errors as `run_study`."""
    return run_study(Store.open(folder).study, folder, **options)


def status_of(folder: str | Path) -> Status:
    """How far the study of a folder is. Raises `DartLabError` if there is none."""
    store = Store.open(folder)
    everything = cells(store.study)
    done = [cell.number for cell in everything if store.has(cell.number)]
    records = failures = 0
    for number in done:
        table = pd.read_parquet(store.part(number), columns=["failure"])
        records, failures = records + len(table), failures + int(table["failure"].notna().sum())
    return Status(len(done), len(everything), records, failures)


def merge_folders(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Put parts that several machines ran together, in a folder of its own, and write the records of the whole.

    Returns:
        The records.

    Raises:
        DartLabError: folders of different studies, or of models or versions that differ; blocks that no folder has
            (those that were found stay in `out`, which can be resumed).
    """
    stores = [Store.open(folder) for folder in folders]
    if not stores:
        raise DartLabError("give the folders to merge")
    target = Store.create(out, stores[0].study)
    with target.locked():
        everything = cells(target.study)
        for store in stores:
            if store.study.fingerprint != target.study.fingerprint:
                raise DartLabError(f"{store.folder} holds another study than {stores[0].folder}")
            for model, facts in store.provenance().items():
                target.check_provenance(model, facts)
            for cell in everything:
                if store.has(cell.number) and not target.has(cell.number):
                    target.adopt(store, cell.number)
        return target.merge(len(everything))


def _execute(
    store: Store, study: Study, left: Sequence[Cell], tasks: Mapping[str, Task], executor: str, workers: int | None,
    progress: bool | None,
) -> None:  # fmt: skip
    from tqdm import tqdm

    shown = sys.stderr.isatty() if progress is None else progress
    results: Iterator[Result]
    if executor == "ray":
        from dart_lab.studies.distributed import run_with_ray

        results = run_with_ray(study, left, workers)
    else:
        results = map(CellRunner(study, tasks).run, left)
    with tqdm(total=len(left), desc="study", unit="block", disable=not shown) as bar:
        for number, records, seconds, facts in results:
            store.check_provenance(facts["studied_as"], {k: v for k, v in facts.items() if k != "studied_as"})
            store.save(number, records, seconds)
            bar.update()
