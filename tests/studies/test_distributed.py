"""A study on a local Ray cluster of two nodes, one of which is killed in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dart_lab.errors import DartLabError
from dart_lab.studies.plan import Grid, Study, TaskSpec
from dart_lab.studies.run import run_study
from dart_lab.studies.store import Store
from tests.models import tiny_llava

ray = pytest.importorskip("ray", reason="the extra ray is not installed")


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 * 2**20})
    made.second = made.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def study_of(folder: Path) -> Study:
    model = tiny_llava(folder / "llava", grid=4)
    grids = (Grid(method="dart", parameters={"keep": (4, 8)}),)
    return Study(
        models=(str(model),), tasks=(TaskSpec(name="shapes", n=12),), grids=grids, batch_size=2, max_new_tokens=2
    )


@pytest.mark.timeout(280)
def test_a_node_that_dies_changes_no_byte(cluster: Any, tmp_path: Path) -> None:
    study = study_of(tmp_path)
    alone = run_study(study, tmp_path / "alone")
    store = Store.create(tmp_path / "spread", study)

    def kill() -> None:
        while not any(store.has(cell) for cell in range(6)):
            time.sleep(0.05)
        cluster.remove_node(cluster.second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    spread = run_study(study, store.folder, executor="ray", workers=2)
    killer.join()
    assert spread.read_bytes() == alone.read_bytes()
    assert not cluster.second.any_processes_alive()
    with pytest.raises(DartLabError, match="at least 1"):
        run_study(study, tmp_path / "none", executor="ray", workers=0)
