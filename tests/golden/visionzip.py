"""VisionZip: dominant tokens, the assignment of the others, and the merged features."""

from __future__ import annotations

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.visionzip import VisionZip
from tests.golden.case import Case


def run(case: Case) -> None:
    p, states = case.params, case.inputs["hidden_states"]
    rows = case.inputs["cls_rows"]
    signals = Signals(
        visual=torch.arange(states.shape[1]).expand(len(states), -1),
        attended=torch.ones(states.shape[:2], dtype=torch.bool),
        providers={"attention": lambda queries: rows[:, :, None, :], "keys": lambda: case.inputs["metric"][:, None]},
        cls=torch.zeros(len(states), dtype=torch.int64),
    )
    contextual = p["contextual"]
    pruner = VisionZip(keep=p["dominant"] + 1 + contextual, contextual=contextual, budget="official")
    if "exception" in case.outputs and pruner.keep <= states.shape[1]:
        assert pruner(signals).counts.tolist() == [pruner.keep] * len(states)
        return
    if "exception" in case.outputs:
        with pytest.raises(DartLabError, match=f"only {states.shape[1]}"):
            pruner(signals)
        return
    got, want = pruner(signals), case.outputs
    assert got.counts.tolist() == [want["n_out"]] * len(states)
    dominant = got.sequence[:, :-contextual] if contextual else got.sequence
    assert torch.equal(dominant, want["dominant_indices_sorted"])
    tolerance = case.record["tolerance"]["output_tokens"]
    torch.testing.assert_close(got.apply(states), want["output_tokens"], atol=tolerance, rtol=0)
    if not contextual:
        return
    home = got.members()[:, -contextual:].long().argmax(dim=1)  # (batch, n): which contextual token
    for row, remaining in enumerate(want["remaining_indices"]):
        targets = remaining[want["target_positions_in_remaining"]]
        assert torch.equal(got.sequence[row, -contextual:], targets)
        merged = remaining[~torch.isin(remaining, targets)]
        assert torch.equal(home[row, merged], want["assignment_of_merged"][row])
