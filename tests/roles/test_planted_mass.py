"""Attention mass of planted roles, on every plan: against the model's own weights, and against counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dart_lab as dl
from dart_lab.errors import DartLabError
from dart_lab.probes.attention_mass import AFTER, BEFORE, BOS, LAST, OUTSIDE, AttentionMass, MassTrace
from dart_lab.roles.labels import ROLES, as_groups
from dart_lab.vlm import compat
from tests.models import SPECIAL
from tests.probes.test_attention_mass import by_loops
from tests.roles.planted import BOTH, LAYERS, PLANS, fitted, planted_pool, planted_vlm, truth

IMAGE = SPECIAL.index("<image>")
QUESTIONS = ["what shape is the red circle ?", "how many ?"]  # of unlike length, so that one row is padded
CLOSE, TOTAL = 2e-6, 1e-6  # of a mass or score; of the sum of a query set
NAMES = AttentionMass(groups={role: [] for role in ROLES}).names


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return planted_vlm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model with queries of zero: every token pays the same attention to every token that it sees."""
    vlm = planted_vlm(tmp_path_factory.mktemp("even"))
    for layer in compat.text_model(vlm.model).layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    return vlm


def planted(vlm: Any, name: str) -> tuple[Any, list[np.ndarray]]:
    """A padded batch of two pictures after a plan, and the codes of their tokens."""
    new, codes = planted_pool(PLANS[name], len(QUESTIONS), seed=3)
    return vlm.prepare([new[number] for number in range(len(QUESTIONS))], QUESTIONS), codes


def labels(inputs: Any, codes: list[np.ndarray]) -> Tensor:
    """`(batch, sequence)`: the group of every position as it was planted, as an index into `NAMES`; −1: padding."""
    out = torch.full(inputs["input_ids"].shape, OUTSIDE)
    for row, ids, mask, own in zip(out, inputs["input_ids"], inputs["attention_mask"].bool(), codes, strict=True):
        start, visual = int(mask.int().argmax()), (ids == IMAGE).nonzero()[:, 0]
        row[start : visual[0]], row[visual[-1] + 1 :] = NAMES.index(BEFORE), NAMES.index(AFTER)
        row[start] = NAMES.index(BOS)
        for role in ROLES:
            row[visual[torch.from_numpy(truth(own, role))]] = NAMES.index(role)
    return out


def visible(label: Tensor) -> Tensor:
    """`(batch, 1, sequence, sequence)` bool: which keys each query may see."""
    return torch.ones(label.shape[1], label.shape[1], dtype=torch.bool).tril() & (label != OUTSIDE)[:, None, None]


def by_definition(weights: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Mass and pairwise score of every query set, "last" too, from `weights` `(batch, heads, sequence, sequence)`."""
    allowed, own = visible(label), torch.zeros_like(label[:, -1:])
    groups = by_loops(weights, allowed, label, label, len(NAMES))
    last = by_loops(weights[:, :, -1:], allowed[:, :, -1:], own, label, len(NAMES))
    mass, pairwise = (torch.cat([a, b[:, :, :1]], dim=2) for a, b in zip(groups, last, strict=True))
    return mass, pairwise


def check(trace: MassTrace, label: Tensor, weights: Sequence[Tensor]) -> None:
    """Hold every layer's record against that layer's weights, and empty groups against what is documented of them.

    Rows sum to 1; a group that a query set cannot see gets 0 and has no pairwise score; an empty query set has no row.
    """
    assert sorted(trace.passes[0].layers) == list(range(LAYERS))
    for layer, (mass, pairwise, _, _) in trace.passes[0].layers.items():
        expected, each = by_definition(weights[layer].double(), label)
        np.testing.assert_allclose(mass, expected, atol=CLOSE, rtol=0)
        np.testing.assert_allclose(pairwise, each, atol=CLOSE, rtol=0)  # NaN in the same places
    table = trace.table(heads=True)
    sums = table.groupby(["sample", "layer", "head", "query"])["mass"].sum()
    assert sums.sub(1).abs().max() <= TOTAL
    unseen = table["keys"] == 0
    assert (table.loc[unseen, "mass"] == 0).all() and table["pairwise"].isna().equals(unseen)
    for sample, own in enumerate(label):
        present = {NAMES[group] for group in own[own != OUTSIDE].tolist()}
        rows = table[table["sample"] == sample]
        assert set(rows["query"]) == {*present, LAST} and set(rows["key"]) == set(NAMES)
        assert not rows.loc[~rows["key"].isin(present), "keys"].any()


@pytest.mark.parametrize("name", PLANS)
def test_masses_are_those_of_the_models_own_weights(vlm: Any, tmp_path: Path, name: str) -> None:
    """Roles from a rolebook on one side; on the other dense attention, and the groups as they were planted."""
    inputs, codes = planted(vlm, name)
    roles = fitted(vlm, PLANS[name], tmp_path / "book").assign(vlm, inputs)
    with dl.record(vlm, AttentionMass(groups=as_groups(roles))) as trace, torch.no_grad():
        vlm.model(**inputs)
    vlm.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = vlm.model(**inputs, output_attentions=True).attentions
    vlm.model.set_attn_implementation("sdpa")
    check(trace, labels(inputs, codes), weights)


@pytest.mark.parametrize("name", PLANS)
def test_even_attention_is_counted(even: Any, name: str) -> None:
    """Each query pays 1/n to each of the n keys that it sees, so that places alone say every mass."""
    inputs, codes = planted(even, name)
    label = labels(inputs, codes)
    groups = {role: [truth(own, role) for own in codes] for role in ROLES}
    with dl.record(even, AttentionMass(groups=groups)) as trace, torch.no_grad():
        even.model(**inputs)
    seen = visible(label).double()
    heads = even.model.config.get_text_config().num_attention_heads
    share = (seen / seen.sum(dim=-1, keepdim=True)).nan_to_num(nan=0.0)  # a row of padding sees nothing
    check(trace, label, [share.expand(-1, heads, -1, -1)] * LAYERS)


def test_a_token_of_two_roles_counts_by_its_primary_one(vlm: Any, tmp_path: Path) -> None:
    """All its flags are refused as groups, since masses would not add up; the plans above have primary roles."""
    name = "roles that overlap"
    inputs, codes = planted(vlm, name)
    roles = fitted(vlm, PLANS[name], tmp_path / "book").assign(vlm, inputs)
    flags = {role: [own.flags[role] for own in roles] for role in ROLES[:-1]}
    with (
        pytest.raises(DartLabError, match="'llm-sink' is in another group too; give each its primary group"),
        dl.record(vlm, AttentionMass(groups=flags)),
        torch.no_grad(),
    ):
        vlm.model(**inputs)
    primary = AttentionMass(groups=as_groups(roles))
    for number, own in enumerate(codes):
        label = primary.members(None, number, len(own))
        assert (own == BOTH).any() and (label[own == BOTH] == NAMES.index("vit-sink")).all()
