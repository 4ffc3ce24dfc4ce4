"""How long a rolebook takes on a large pool, what it holds in memory, and what it survives.

    python benchmarks/rolebook.py [--pictures 10000 --kills 2]

`dart-lab roles fit` on `tiny` and drawn pictures, in a process of its own: once uninterrupted, once killed (SIGKILL) at
even distances and started again; the two books are compared byte by byte. Resident memory is read at every finished
block of the uninterrupted run; the slope is a least-squares line over the second half.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import save

LOOK_SECONDS = 0.05  # between two looks at the running process


def main() -> None:
    """Measure, save the record and print it."""
    options = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, killed = folder / "whole.rolebook", folder / "killed.rolebook"
        record = watched(whole, options.pictures)
        stops = [round(int(record["blocks"]) * (kill + 1) / (options.kills + 1)) for kill in range(options.kills)]
        for blocks in stops:
            kill_at(killed, options.pictures, blocks)
        fit(killed, options.pictures).wait()
        record["killed_after_blocks"] = stops
        record["same_bytes"] = whole.read_bytes() == killed.read_bytes()
    print(save("rolebook", record))
    print(record)


def fit(book: Path, pictures: int) -> subprocess.Popen[bytes]:
    """The command, begun."""
    command = "from dart_lab.cli import main; main()"
    words = ["roles", "fit", "--model", "tiny", "--images", "shapes", "--n", str(pictures), "--out", str(book)]
    return subprocess.Popen([sys.executable, "-c", command, *words])


def finished(book: Path) -> int:
    """Blocks of the fit that are done."""
    return len(list(book.with_name(book.name + ".work").glob("block-*.npz")))


def watched(book: Path, pictures: int) -> dict[str, object]:
    """An uninterrupted fit: seconds, and resident memory block by block."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    process, sizes = fit(book, pictures), []
    while process.poll() is None:
        if finished(book) > len(sizes):
            sizes.append(resident(process.pid))
        time.sleep(LOOK_SECONDS)
    if process.returncode:
        sys.exit(process.returncode)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    half = np.array(sizes[len(sizes) // 2 :])
    slope = np.polyfit(np.arange(len(half)) * pictures / len(sizes), half, 1)[0]
    return {
        "pictures": pictures, "blocks": len(sizes), "wall_s": round(time.monotonic() - began, 1),
        "processor_s": round(usage.ru_utime - before, 1), "first_mib": round(sizes[0], 1),
        "last_mib": round(sizes[-1], 1), "slope_mib_per_1000_pictures": round(float(slope) * 1000, 2),
        "peak_mib": round(usage.ru_maxrss / 1024, 1),
    }  # fmt: skip


def resident(pid: int) -> float:
    """Resident memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20


def kill_at(book: Path, pictures: int, blocks: int) -> None:
    """Begin the fit, or go on with it, and kill it after so many blocks."""
    process = fit(book, pictures)
    while finished(book) < blocks:
        if process.poll() is not None:
            sys.exit(f"the fit ended before it could be killed, with {process.returncode}")
        time.sleep(LOOK_SECONDS)
    process.kill()
    process.wait()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A rolebook on a large pool: time, memory, kills")
    parser.add_argument("--pictures", type=int, default=10_000, help="pictures in the pool (default 10000)")
    parser.add_argument("--kills", type=int, default=2, help="kills of the second run (default 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
