"""EPIC's random selection: only how many tokens it keeps can be shared, see EXCEPTIONS.md."""

from __future__ import annotations

import torch

from dart_lab.pruners.random import Random
from dart_lab.pruners.signals import Signals
from tests.golden.case import Case


def run(case: Case) -> None:
    p = case.params
    length = p["image_token_length"]
    wanted = int(length * (1 - p["reduction_ratio"]))
    assert wanted == case.outputs["n_kept"]
    signals = Signals.of(visual=torch.arange(p["image_token_start_index"], p["image_token_start_index"] + length)[None])
    assert Random(keep=wanted)(signals).counts.tolist() == [wanted]
    for name, kept in case.outputs.items():
        if name.endswith("_kept") and isinstance(kept, torch.Tensor):
            assert len(set(kept.tolist())) == wanted
