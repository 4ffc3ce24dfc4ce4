"""Studies that are killed, crowded, starved and fed with broken pictures end with the same bytes and no lost row."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image

from dart_lab.errors import DartLabError
from dart_lab.studies import cells as cells_module
from dart_lab.studies import store as store_module
from dart_lab.studies.cells import cells, run_cell
from dart_lab.studies.plan import NONE_KEPT, UNPRUNED, Grid, Study, TaskSpec
from dart_lab.studies.run import merge_folders, resume_study, run_study, status_of
from dart_lab.studies.store import RECORDS, Store
from tests.models import tiny_llava

CONDITIONS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava(tmp_path_factory.mktemp("model") / "llava", grid=4)


@pytest.fixture(scope="module")
def study(model: Path) -> Study:
    return Study(
        models=(str(model),), tasks=(TaskSpec(name="shapes", n=9), TaskSpec(name="shapes", n=4, families=("exist",))),
        grids=(Grid(method="dart", parameters={"keep": (4, 8)}), Grid(text=("fastv:0.25", "fastervlm:4"))),
        batch_size=4, max_new_tokens=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_study(study, tmp_path_factory.mktemp("whole") / "run").parent


def test_records_are_complete_and_in_the_order_of_the_plan(study: Study, finished: Path) -> None:
    records = pd.read_parquet(finished / RECORDS)
    assert len(records) == (9 + 4) * CONDITIONS
    assert records["condition"].tolist()[:CONDITIONS] == list(study.conditions())
    assert not records.duplicated(["task", "condition", "sample"]).any() and records["failure"].isna().all()
    assert records.loc[records["condition"] == "dart keep=4", "got"].eq(4).all()
    assert records.loc[records["condition"] == NONE_KEPT, "got"].eq(0).all()
    assert records.loc[records["condition"] == UNPRUNED, "got"].eq(16).all()
    alone = records.loc[records["condition"] == "fastervlm:4"]
    assert not alone["shared"].any() and alone["reason"].str.contains("VISION_OUT").all()
    status = status_of(finished)
    assert (status.done, status.cells, status.records, status.failures) == (4, 4, 13 * CONDITIONS, 0)


def test_blocks_and_workers_do_not_show_in_the_bytes(study: Study, finished: Path, tmp_path: Path) -> None:
    """Three machines with a third each, merged; and a folder whose last parts were lost and made again."""
    for i in range(3):
        run_study(study, tmp_path / str(i), part=(i, 3))
    merged = merge_folders([tmp_path / str(i) for i in range(3)], tmp_path / "all")
    assert merged.read_bytes() == (finished / RECORDS).read_bytes()
    (tmp_path / "all" / "parts" / "000002.parquet").unlink()
    merged.unlink()
    assert resume_study(tmp_path / "all").read_bytes() == (finished / RECORDS).read_bytes()


KILLED = """
import sys
from dart_lab.studies.run import resume_study
resume_study(sys.argv[1], progress=False)
"""


def test_killed_at_random_moments_it_ends_with_the_same_bytes(study: Study, finished: Path, tmp_path: Path) -> None:
    Store.create(tmp_path / "run", study)
    draw, kills = random.Random(0), 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "run")], stderr=subprocess.PIPE)
        before = len(list((tmp_path / "run").rglob("*")))
        while process.poll() is None and len(list((tmp_path / "run").rglob("*"))) <= before + 1:
            time.sleep(0.005)  # until it has written something, however fast this machine is
        time.sleep(draw.uniform(0, 0.2))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills > 0
    path = resume_study(tmp_path / "run")
    assert path.read_bytes() == (finished / RECORDS).read_bytes()
    assert not list((tmp_path / "run").rglob(".*")), "nothing half written is left"


def test_a_part_that_was_cut_short_is_made_again(study: Study, finished: Path, tmp_path: Path) -> None:
    folder = run_study(study, tmp_path / "run").parent
    part = folder / "parts" / "000001.parquet"
    part.write_bytes(part.read_bytes()[:100])
    (folder / "parts" / ".000003.parquet.abc").write_bytes(b"half")
    assert status_of(folder).done == 3
    assert resume_study(folder).read_bytes() == (finished / RECORDS).read_bytes()
    assert not (folder / "parts" / ".000003.parquet.abc").exists()


def test_two_processes_do_not_share_a_folder(study: Study, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", study)
    code = "import sys; from dart_lab.studies.run import resume_study; resume_study(sys.argv[1])"
    with store.locked():
        other = subprocess.run(
            [sys.executable, "-c", code, str(store.folder)], capture_output=True, text=True, check=False
        )
    assert other.returncode != 0 and "in use by another process" in other.stderr and str(os.getpid()) in other.stderr
    with store.locked():  # the lock is free again
        pass


def test_of_two_that_start_at_once_only_one_makes_the_plan(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second starter comes exactly when the first has seen no plan and is about to write its own."""
    other = Study(tasks=study.tasks[:1], models=study.models)
    real, refused = store_module.write_files, []

    def crowded(contents: Any, **options: Any) -> Any:
        if not refused:
            with pytest.raises(DartLabError, match="in use by another process") as caught:
                Store.create(tmp_path / "run", other)
            refused.append(caught)
        return real(contents, **options)

    monkeypatch.setattr(store_module, "write_files", crowded)
    made = Store.create(tmp_path / "run", study)
    assert refused and Store.open(made.folder).study.fingerprint == study.fingerprint
    with pytest.raises(DartLabError, match="another study"):
        Store.create(tmp_path / "run", other)


def test_a_start_that_was_killed_does_not_block_the_folder(study: Study, tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / ".plan.json.x1").write_text("{")
    assert Store.create(tmp_path, study).study is study


def test_a_folder_of_other_files_is_refused_before_anything_is_written(study: Study, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DartLabError, match="no study; give an empty folder"):
        Store.create(tmp_path, study)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_full_disk_stops_the_run_and_loses_nothing(study: Study, finished: Path, tmp_path: Path) -> None:
    """The third part does not fit; what was written stays, and the run goes on once there is room."""
    limit = (finished / "parts" / "000000.parquet").stat().st_size - 1
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "from dart_lab.cli import main; main(['study', 'resume', sys.argv[1]])"
    )
    store = Store.create(tmp_path / "run", study)
    for cell in (1, 2):
        store.part(cell).parent.mkdir(exist_ok=True)
        store.part(cell).write_bytes((finished / "parts" / f"{cell:06d}.parquet").read_bytes())
    out = subprocess.run([sys.executable, "-c", code, str(store.folder)], capture_output=True, text=True, check=False)
    assert out.returncode == 1 and "cannot be written" in out.stderr and "Traceback" not in out.stderr
    assert not list(store.folder.rglob(".*")) and store.has(1) and not store.has(0)
    assert resume_study(store.folder).read_bytes() == (finished / RECORDS).read_bytes()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit


def test_another_study_other_weights_or_another_version_are_refused(study: Study, tmp_path: Path) -> None:
    folder = run_study(study, tmp_path / "run").parent
    with pytest.raises(DartLabError, match="another study"):
        run_study(Study(tasks=study.tasks, models=study.models), folder)
    facts = json.loads((folder / "provenance.json").read_text())
    facts[study.models[0]]["weights_sha256"] = "0" * 64
    (folder / "provenance.json").write_text(json.dumps(facts))
    (folder / "parts" / "000000.parquet").unlink()
    with pytest.raises(DartLabError, match="weights_sha256 changed"):
        resume_study(folder)
    with pytest.raises(DartLabError, match="no study"):
        resume_study(tmp_path / "elsewhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("mine")
    with pytest.raises(DartLabError, match="no study; give an empty folder"):
        run_study(study, tmp_path / "other")


def test_missing_provenance_is_refused(study: Study, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", study)
    with pytest.raises(DartLabError, match="lacks weights_sha256"):
        store.check_provenance("m", {"model": "m"})


def pictures(folder: Path) -> Path:
    """Four pictures, the second of which is broken."""
    folder.mkdir()
    for i in range(4):
        Image.new("RGB", (64, 64), (60 * i, 0, 0)).save(folder / f"{i}.png")
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:60])
    rows = "\n".join(f"{i}.png,what shape is the red,circle" for i in range(4))
    (folder / "questions.csv").write_text(f"image,question,answer\n{rows}\n")
    return folder


def test_a_broken_picture_is_recorded_and_the_others_go_on(model: Path, tmp_path: Path) -> None:
    study = Study(
        models=(str(model),), tasks=(TaskSpec(name=str(pictures(tmp_path / "data"))),), max_new_tokens=2,
        grids=(Grid(method="dart", parameters={"keep": (4,)}),),
    )  # fmt: skip
    records = pd.read_parquet(run_study(study, tmp_path / "run"))
    broken = records[records["failure"].notna()]
    assert len(records) == 4 * 3 and len(broken) == 3 and broken["failure"].str.contains("1.png").all()
    assert broken["condition"].tolist() == list(study.conditions()) and broken["correct"].isna().all()
    assert status_of(tmp_path / "run").failures == 3


class Loaded:
    """A study's model and first cell."""

    def __init__(self, study: Study) -> None:
        import dart_lab as dl

        self.study, self.vlm = study, dl.load(study.models[0])
        self.cell = cells(study)[0]
        self.task = cells_module.open_task(self.cell.task)

    def run(self) -> pd.DataFrame:
        return run_cell(self.vlm, self.task, self.cell, self.study.conditions(), max_new_tokens=3)[0]


@pytest.fixture
def loaded(study: Study) -> Iterator[Loaded]:
    yield Loaded(study)


def test_out_of_memory_halves_the_batch_and_changes_no_answer(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sizes, real = loaded.run(), [], cells_module.branch

    def scarce(vlm: Any, inputs: Any, pruners: Any, **options: Any) -> Any:
        work = len(inputs["input_ids"]) * len(pruners)
        sizes.append(work)
        if work > 2 * CONDITIONS:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(vlm, inputs, pruners, **options)

    monkeypatch.setattr(cells_module, "branch", scarce)
    assert loaded.run().equals(whole) and sizes == [4 * CONDITIONS, 2 * CONDITIONS, 2 * CONDITIONS]


def test_memory_for_nothing_is_recorded(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(cells_module, "branch", none)
    records = loaded.run()
    assert len(records) == 4 * CONDITIONS and records["failure"].str.contains("out of memory").all()


def test_a_condition_that_fails_fails_alone(study: Study) -> None:
    impossible = Study(
        tasks=study.tasks[:1], models=study.models, max_new_tokens=2,
        grids=(Grid(text=("dart:4", "feature-downsample:7")),),  # 7 tokens are no grid
    )  # fmt: skip
    records = Loaded(impossible).run()
    failed = records[records["failure"].notna()]
    assert set(failed["condition"]) == {"feature-downsample:7"} and len(failed) == 8
    assert records.loc[records["condition"] == "dart:4", "got"].eq(4).all()


def test_an_error_of_the_model_is_recorded_and_one_of_the_device_stops(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> list[Any]:
        raise RuntimeError(message)

    monkeypatch.setattr(cells_module, "branch", broken)
    message = "shapes cannot be multiplied"
    assert set(loaded.run()["failure"]) == {message}
    message = "CUDA error: device-side assert triggered"
    with pytest.raises(RuntimeError, match="CUDA error"):
        loaded.run()


def test_broken_logits_are_recorded_for_the_sample_that_has_them(loaded: Loaded) -> None:
    head = loaded.vlm.model.get_output_embeddings()

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., 0] = float("nan")
        return output

    handle = head.register_forward_hook(spoil)
    try:
        records = loaded.run()
    finally:
        handle.remove()
    assert records["failure"].eq("the model's logits are NaN").all()


def test_ties_are_flagged(loaded: Loaded) -> None:
    records = loaded.run()
    assert records["tie_sensitive"].eq(records["margin"] < cells_module.TIE).all()
    head = loaded.vlm.model.get_output_embeddings()
    with torch.no_grad():
        head.weight.zero_()
    assert loaded.run()["tie_sensitive"].all()


def test_a_termination_leaves_a_folder_that_goes_on(study: Study, finished: Path, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", study)
    code = "import sys; from dart_lab.cli import main; main(['study', 'resume', sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-c", code, str(store.folder)], stderr=subprocess.PIPE)
    while not store.has(0) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (0, 130) and b"Traceback" not in said
    assert resume_study(store.folder).read_bytes() == (finished / RECORDS).read_bytes()
