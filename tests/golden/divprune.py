"""DivPrune's selection: the released function, and LightCompress's port of it."""

from __future__ import annotations

import torch

from dart_lab.pruners.divprune import DivPrune
from dart_lab.pruners.signals import Signals
from tests.golden.case import Case


def run(case: Case) -> None:
    features, want = case.inputs["features"], case.outputs
    signals = Signals.of(visual=torch.arange(len(features))[None], hidden=features[None])
    got = DivPrune(keep=float(case.params["threshold_ratio"]), budget="official")(signals)
    assert got.counts.tolist() == [want["n_kept"]]
    assert torch.equal(got.order[0], want["selected_in_order"])
    assert torch.equal(got.keep[0], want["selected_sorted"])
    if want.get("maxmin_value_per_step") is not None:
        tolerance = case.record["tolerance"]["maxmin_value_per_step"]
        torch.testing.assert_close(got.notes["reach"][0], want["maxmin_value_per_step"], atol=tolerance, rtol=0)
