"""What a sweep over methods in front of the language model gains when the vision tower runs once for all of them.

    python benchmarks/encode_once.py [--n 8 --repeats 3]

On `tiny` and on the random model of branch.py, whose vision tower is as wide and deep in proportion as that of
LLaVA-1.5. The language model runs apart for each condition on both sides.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from branch import VISUAL, random_batch, random_model, tiny_batches
from machine import medians, save
from torch import Tensor

import dart_lab as dl
from dart_lab.pruners import Pruner, make_pruner
from dart_lab.studies.branch import branch
from dart_lab.vlm import compat

METHODS = ("divprune", "visionzip", "vispruner", "prumerge")
BUDGETS = (64, 128, 192)
NEW_TOKENS = 2


def main() -> None:
    """Measure, save the record and print it."""
    parser = argparse.ArgumentParser(description="Methods in front of the language model, from one run of the tower")
    parser.add_argument("--n", type=int, default=8, help="questions on tiny (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of each (default 3)")
    options = parser.parse_args()
    vlm = dl.load("tiny")
    found = {
        "random": measure(random_model(), [random_batch(1)], options.repeats),
        "tiny": measure(vlm.model, tiny_batches(vlm, "exist", options.n), options.repeats),
    }
    for name, result in found.items():
        print(name, {key: value for key, value in result.items() if key != "times"})
    record = {
        "methods": METHODS, "budgets": BUDGETS, "visual_tokens": VISUAL, "dtype": "float32",
        "repeats": options.repeats, "found": found,
    }  # fmt: skip
    print(save("encode_once", record))


def measure(model: Any, batches: Sequence[Mapping[str, Any]], repeats: int) -> dict[str, Any]:
    """Times of the sweep, shared and alone, and of the tower by itself; runs of the tower, and answers that agree."""
    pruners: list[Pruner | None] = [make_pruner(name, keep=keep) for name in METHODS for keep in BUDGETS]
    answers: dict[bool, list[Tensor]] = {}
    tower = compat.vision_tower(model)
    if tower is None:
        raise SystemExit("the model has no vision tower")

    def sweep(share: bool) -> None:
        found = [branch(model, inputs, pruners, max_new_tokens=NEW_TOKENS, share=share) for inputs in batches]
        answers[share] = [one.tokens for conditions in found for one in conditions]

    def encode() -> None:
        with torch.no_grad():
            for inputs in batches:
                tower(inputs["pixel_values"])

    runs: dict[str, int] = {}
    for name, share in (("shared", True), ("alone", False)):
        ran: list[int] = []
        handle = compat.vision_blocks(tower)[0].register_forward_hook(lambda *_, ran=ran: ran.append(1))
        sweep(share)
        handle.remove()
        runs[name] = len(ran)
    work = {"shared": lambda: sweep(True), "alone": lambda: sweep(False), "tower": encode}
    times = medians(work, repeats, warm_up=0)
    pairs = list(zip(answers[True], answers[False], strict=True))
    return {
        "prompts": sum(len(inputs["input_ids"]) for inputs in batches), "times": times, "runs": runs,
        "gain": round(times["alone"]["median_ms"] / times["shared"]["median_ms"], 3),
        "answers": sum(len(one) for one, _ in pairs),
        "same_answers": sum(int((one == other).all(dim=1).sum()) for one, other in pairs),
    }  # fmt: skip


if __name__ == "__main__":
    main()
