"""CDPruner: relevance and diversity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners import CDPruner, Signals
from dart_lab.testing import check_pruner


def signals(relevance: torch.Tensor, states: torch.Tensor | None = None, **more) -> Signals:
    n = relevance.shape[1]
    hidden = torch.eye(n).expand(len(relevance), -1, -1) if states is None else states
    return Signals.of(visual=torch.arange(n).expand(len(relevance), -1), hidden=hidden, relevance=relevance, **more)


@pytest.mark.parametrize("method", [CDPruner(keep=4), CDPruner(keep=4, theta=0.5)])
def test_contract(method) -> None:
    check_pruner(method)


def test_unlike_tokens_come_in_order_of_relevance_which_is_negated_likeness() -> None:
    likeness = torch.tensor([[0.3, 0.1, 0.2, 0.05]])
    assert CDPruner(keep=4)(signals(likeness)).order.tolist() == [[3, 1, 2, 0]]


def test_a_duplicate_of_a_relevant_token_waits_for_what_is_new() -> None:
    states = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    likeness = torch.tensor([[0.0, 0.01, 0.2, 0.3]])
    assert CDPruner(keep=2)(signals(likeness, states)).order.tolist() == [[0, 2]]


def test_equal_relevance_leaves_the_choice_to_diversity() -> None:
    states = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2])][None]
    got = CDPruner(keep=3)(signals(torch.full((1, 5), 0.2), states))
    assert got.keep.tolist() == [[0, 2, 4]] and not got.notes["gain"].isnan().any()


def test_relevance_is_scaled_over_the_crops_of_an_image_and_never_over_images() -> None:
    likeness = torch.tensor([[0.0, 0.1], [0.2, 0.4], [0.9, 0.8]])
    by_image = signals(likeness, image=torch.tensor([0, 0, 1]))
    pruner = CDPruner(keep=1)
    torch.testing.assert_close(pruner.relevance(by_image), torch.tensor([[1.0, 0.75], [0.5, 0.0], [0.0, 1.0]]))
    per_crop = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(CDPruner(keep=1, per_crop=True).relevance(by_image), per_crop)
    torch.testing.assert_close(pruner.relevance(signals(likeness)), per_crop)


def test_theta_turns_relevance_up() -> None:
    states = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
    likeness = torch.tensor([[0.0, 0.0, 1.0]])
    assert CDPruner(keep=2, theta=0.0)(signals(likeness, states)).keep.tolist() == [[0, 2]]
    assert CDPruner(keep=2, theta=0.95)(signals(likeness, states)).keep.tolist() == [[0, 1]]
    with pytest.raises(DartLabError, match="theta"):
        CDPruner(keep=2, theta=1.0)


def test_a_model_without_text_tower_is_refused_in_one_line() -> None:
    without = replace(signals(torch.zeros(1, 3)), providers={"hidden": lambda: torch.zeros(1, 3, 3)})
    with pytest.raises(DartLabError, match="no text tower"):
        CDPruner(keep=2)(without)
