"""DivPrune: the kept set, its budget and where it acts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners import DivPrune, Signals, Stage
from dart_lab.testing import check_pruner


def signals(tokens: torch.Tensor, before: int = 2, after: int = 3) -> Signals:
    n = tokens.shape[1]
    hidden = torch.nn.functional.pad(tokens, (0, 0, before, after), value=5.0)
    return Signals.of(visual=torch.arange(before, before + n).expand(len(tokens), -1), hidden=hidden)


@pytest.mark.parametrize("where", ["LLM_IN", "PROJECTED", "LLM_LAYER"])
def test_contract(where) -> None:
    check_pruner(DivPrune(keep=4, where=where))


def test_one_of_every_direction_however_often_it_occurs() -> None:
    group = torch.tensor([0, 0, 1, 0, 2, 1, 0, 2])
    kept = DivPrune(keep=3)(signals(torch.eye(3)[group][None])).keep[0]
    assert sorted(group[kept].tolist()) == [0, 1, 2]


def test_keeping_all_is_the_identity_and_nothing_is_kept_twice() -> None:
    tokens = torch.ones(1, 6, 4)
    assert DivPrune(keep=6)(signals(tokens)).keep.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert DivPrune(keep=4)(signals(tokens)).keep.tolist() == [[0, 1, 2, 3]]


def test_text_does_not_count() -> None:
    tokens = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0))
    kept = DivPrune(keep=4)(signals(tokens)).keep
    assert torch.equal(kept, DivPrune(keep=4)(signals(tokens, before=7, after=0)).keep)


@pytest.mark.parametrize(
    ("n", "ratio", "exact", "official"), [(25, 0.5, 13, 12), (27, 0.5, 14, 14), (576, 0.111, 64, 64)]
)
def test_rounding_of_a_ratio(n, ratio, exact, official) -> None:
    tokens = torch.randn(1, n, 8, generator=torch.Generator().manual_seed(n))
    assert DivPrune(keep=ratio)(signals(tokens)).counts.tolist() == [exact]
    assert DivPrune(keep=ratio, budget="official")(signals(tokens)).counts.tolist() == [official]


def test_where_it_acts() -> None:
    assert DivPrune(keep=4).stage.kind == "LLM_IN" and DivPrune(keep=4).positions == "compact"
    inside = DivPrune(keep=4, where="LLM_LAYER", layer=5)
    assert inside.stage == Stage("LLM_LAYER", 5) and inside.positions == "original"
    with pytest.raises(DartLabError, match="Known: LLM_IN"):
        dataclasses.replace(inside, where="LLM_IM")
