"""Role by nearest vocabulary ids, as EmbedLens' released selectors assign it."""

from __future__ import annotations

import torch

from dart_lab.roles.lens import nearest_ids
from tests.golden.case import Case


def run(case: Case) -> None:
    p, want = case.params, case.outputs
    span = slice(p["vis_start"], p["vis_end"])
    found = nearest_ids(case.inputs["inputs_embeds"][0, span], case.inputs["vocab"], k=p["top_k"])
    assert torch.equal(found.ids.sort(dim=1).values, want["top3_ids_sorted"])
    role = found.any_of(p["target_ids"])
    assert torch.equal(role, want["role_mask_local"].bool())
    positions = role.nonzero()[:, 0] + p["vis_start"]
    assert len(positions) == want["n"]
    for name in ("useless_positions_absolute", "find_cluster_positions_absolute"):
        assert torch.equal(positions, want[name])
