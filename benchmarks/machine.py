"""What the numbers were measured on, and medians of interleaved repetitions."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import dart_lab

RESULTS = Path(__file__).with_name("results")


def machine() -> dict[str, Any]:
    """Processor, cores and versions; nothing that names the machine."""
    return {
        "processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(), "python": platform.python_version(),
        "torch": torch.__version__, "transformers": transformers.__version__, "dart_lab": dart_lab.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def medians(
    work: Mapping[str, Callable[[], object]], repeats: int, *, warm_up: int = 1
) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time of each piece of work, run in turn on one thread.

    Processor time of one thread says the same on a busy machine; waiting does not count. Returns for each name
    `median_ms` and `least_ms`; `warm_up` further runs of each come before the first counted one.
    """
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-warm_up, repeats):
        for name, run in work.items():
            start = time.process_time()
            run()
            if repeat >= 0:
                taken[name].append((time.process_time() - start) * 1e3)
    return {
        name: {"median_ms": round(statistics.median(ms), 3), "least_ms": round(min(ms), 3)}
        for name, ms in taken.items()
    }


def save(name: str, record: Mapping[str, Any]) -> Path:
    """Write a record beside the benchmarks, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{name}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps({"machine": machine(), **record}, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)
    return target
