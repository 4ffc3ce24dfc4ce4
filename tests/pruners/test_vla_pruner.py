"""VLA-Pruner: the history is the caller's, the newest step weighs most, and the union is thinned out."""

from __future__ import annotations

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners import ActionHistory, VLAPruner
from dart_lab.pruners.signals import Signals
from dart_lab.testing import check_pruner


def warm(*steps: list[float], decay: float = 0.8) -> ActionHistory:
    history = ActionHistory(window=len(steps), decay=decay)
    for step in steps:
        history.push(torch.tensor([step]))
    return history


def signals(received: list[float], seed: int = 0) -> Signals:
    n = len(received)
    embeds = torch.randn(1, n, 6, generator=torch.Generator().manual_seed(seed))
    return Signals.of(visual=torch.arange(n)[None], received=torch.tensor([received]), embeds=embeds)


@pytest.mark.parametrize("semantic", ["mean", "last", "text"])
def test_contract_while_cold(semantic: str) -> None:
    """A cold history keeps everything, whatever was asked."""
    check_pruner(VLAPruner(keep=1.0, semantic=semantic))


def test_history_by_hand() -> None:
    history = warm([1.0, 0.0, float("nan")], [0.0, 2.0, float("nan")], [4.0, float("nan"), float("nan")], decay=0.5)
    expected = [(4 + 0.25 * 1) / 1.75, (0.5 * 2) / 0.75, 0.0]  # newest first: 1, 1/2, 1/4, over those that saw it
    assert history.predict()[0].tolist() == pytest.approx(expected)
    history.push(torch.tensor([[9.0, 9.0, 9.0]]))
    assert len(history.steps) == 3, "the oldest step is forgotten"
    history.reset()
    assert not history.warm
    with pytest.raises(DartLabError, match="empty"):
        history.predict()


def test_the_union_is_thinned_to_the_budget_by_brute_force() -> None:
    received, action = [9, 8, 7, 0, 0, 0, 0, 0], [0, 0, 7.5, 9, 8, 0, 0, 0]
    given = signals(received, seed=3)
    got = VLAPruner(keep=3, history=warm(action))(given)
    union = [0, 1, 2, 3, 4]
    unit = torch.nn.functional.normalize(given.get("embeds")[0], dim=1)
    distance = 1 - unit @ unit.T
    nearest = {i: min(float(distance[i, j]) for j in union if j != i) for i in union}
    chosen = [max(union, key=lambda i: (nearest[i], -i))]
    while len(chosen) < 3:
        rest = [i for i in union if i not in chosen]
        chosen.append(max(rest, key=lambda i: (min(float(distance[i, j]) for j in chosen), -i)))
    assert got.order[0].tolist() == chosen and got.asked.tolist() == [3]


def test_two_equal_sets_are_kept_as_they_are() -> None:
    got = VLAPruner(keep=2, history=warm([0, 5, 0, 6.0]))(signals([0, 3, 1, 4]))
    assert got.keep.tolist() == [[1, 3]]


def test_each_history_is_its_own_and_deciding_leaves_it_alone() -> None:
    one, other = VLAPruner(keep=2), VLAPruner(keep=2)
    assert one.history is not other.history
    history = warm([0, 5, 0, 6.0])
    before = [step.clone() for step in history.steps]
    for _ in range(2):
        VLAPruner(keep=2, history=history)(signals([4, 3, 1, 0]))
    assert all(torch.equal(a, b) for a, b in zip(before, history.steps, strict=True))


def test_a_history_of_other_tokens_is_refused() -> None:
    with pytest.raises(DartLabError, match=r"reset\(\)"):
        VLAPruner(keep=2, history=warm([0, 5, 0.0]))(signals([0, 3, 1, 4]))
    history = ActionHistory()
    history.push(torch.zeros(1, 3))
    with pytest.raises(DartLabError, match=r"reset\(\)"):
        history.push(torch.zeros(1, 4))
    with pytest.raises(DartLabError, match="window ≥ 1"):
        ActionHistory(window=0)
