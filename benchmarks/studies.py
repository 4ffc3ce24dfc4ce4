"""What a study survives and what it holds in memory.

    python benchmarks/studies.py [--kills 25 --samples 5000]

A small random LLaVA answers drawn questions. First the same study runs uninterrupted, and killed (SIGKILL) at random
moments and resumed until it is done: bytes, rows and doubles are compared. Then one study of many samples runs in a
process of its own, which notes its resident memory after every block; the slope is a least-squares line over the second
half.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from machine import save

sys.path.insert(0, str(Path(__file__).parents[1]))

from dart_lab.studies.plan import Grid, Study, TaskSpec
from dart_lab.studies.run import resume_study, run_study
from dart_lab.studies.store import Store
from tests.models import tiny_llava

RESUME = "import sys; from dart_lab.studies.run import resume_study; resume_study(sys.argv[1], progress=False)"
WATCHED = """
import json, resource, sys
from pathlib import Path
import dart_lab.studies.store as store
sizes, save = [], store.Store.save
def noted(self, cell, records, seconds):
    save(self, cell, records, seconds)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sizes.append(pages * resource.getpagesize())
store.Store.save = noted
from dart_lab.studies.run import resume_study
resume_study(sys.argv[1], progress=False)
print(json.dumps(sizes))
"""


def main() -> None:
    """Measure, save the record and print it."""
    options = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_llava(folder / "model", grid=4)
        record = {"kills": kills(folder, model, options.kills), "memory": memory(folder, model, options.samples)}
    print(save("studies", record))
    print(record)


def study_of(model: Path, n: int) -> Study:
    """Four conditions on drawn questions."""
    grids = (Grid(method="dart", parameters={"keep": (4, 8)}),)
    return Study(models=(str(model),), tasks=(TaskSpec(name="shapes", n=n),), grids=grids, max_new_tokens=2)


def kills(folder: Path, model: Path, number: int) -> dict[str, object]:
    """Kill one study so many times at random moments, then let it end."""
    study = study_of(model, 400)
    whole = run_study(study, folder / "whole", progress=False)
    store = Store.create(folder / "killed", study)
    draw, killed, ended = random.Random(0), 0, 0
    while killed < number and ended < number:
        process = subprocess.Popen([sys.executable, "-c", RESUME, str(store.folder)], stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=draw.uniform(1.0, 8.0))
            ended += 1
            (store.folder / "records.parquet").unlink()  # it was done: take the last third away and go on killing
            for part in sorted((store.folder / "parts").glob("*.parquet"))[-15:]:
                part.unlink()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    done = resume_study(store.folder, progress=False)
    rows, truth = pd.read_parquet(done), pd.read_parquet(whole)
    return {
        "killed": killed, "ended_in_between": ended, "samples": 400,
        "same_bytes": done.read_bytes() == whole.read_bytes(), "rows": len(rows),
        "lost": len(truth) - len(rows), "doubled": int(rows.duplicated(["condition", "sample"]).sum()),
    }  # fmt: skip


def memory(folder: Path, model: Path, samples: int) -> dict[str, object]:
    """Resident memory of a study of many samples, block by block."""
    import json

    store = Store.create(folder / "long", study_of(model, samples))
    out = subprocess.run(
        [sys.executable, "-c", WATCHED, str(store.folder)], capture_output=True, text=True, check=True
    )
    sizes = np.array(json.loads(out.stdout)) / 2**20
    half = sizes[len(sizes) // 2 :]
    slope = np.polyfit(np.arange(len(half)) * store.study.batch_size, half, 1)[0]
    return {
        "samples": samples, "blocks": len(sizes), "first_mib": round(float(sizes[0]), 1),
        "last_mib": round(float(sizes[-1]), 1), "slope_kib_per_1000_samples": round(float(slope) * 1024 * 1000, 1),
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Studies under kill -9, and their memory")
    parser.add_argument("--kills", type=int, default=25, help="kills (default 25)")
    parser.add_argument("--samples", type=int, default=5000, help="samples of the long study (default 5000)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
