"""Methods that rank patches by the class token: FasterVLM, VisPruner, SCOPE."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import SCOPE, FasterVLM, VisPruner
from dart_lab.pruners.vispruner import thin_out
from dart_lab.testing import check_pruner
from tests.pruners.crops import class_row, crops
from tests.twins import cosine_twin, top_k_twin


@pytest.mark.parametrize("method", [
    FasterVLM(keep=4), VisPruner(keep=4), VisPruner(keep=4, important=0.0, per_round=1), SCOPE(keep=4),
], ids=lambda method: method.name)
def test_contract(method) -> None:
    check_pruner(method)
    assert method.stage.kind == "VISION_OUT" and method.positions == "compact"


def test_class_attention_is_the_mean_over_heads_of_its_row() -> None:
    signals = crops(3, 3, 4, seed=1, heads=4)
    row = signals.attention(torch.zeros(3, 1, dtype=torch.int64))[:, :, 0, 1:].mean(dim=1)
    got = FasterVLM(keep=5)(signals)
    torch.testing.assert_close(got.score, row)
    assert [sorted(top_k_twin(values, 5)) for values in row.tolist()] == got.keep.tolist()
    assert got.notes["class_token"].tolist() == [True] * 3


def test_without_class_token_attention_received_ranks_and_the_record_says_so() -> None:
    signals = crops(1, 2, 2, class_token=False, received=torch.tensor([[0.1, 0.9, 0.5, 0.2]]))
    for method in (FasterVLM(keep=2), VisPruner(keep=2, important=1.0)):
        got = method(signals)
        assert got.keep.tolist() == [[1, 2]]
        assert got.notes["class_token"].tolist() == [False]


def test_the_question_plays_no_part() -> None:
    signals = crops(2, 3, 3)
    assert not any("text" in name for method in (FasterVLM, VisPruner, SCOPE) for name in method.needs)
    assert torch.equal(FasterVLM(keep=3)(signals).keep, FasterVLM(keep=3)(signals).keep)


def thin_twin(line: list[int], tokens: torch.Tensor, quota: int, per_round: int) -> list[int]:
    """Round by round, on lists."""
    while len(line) > quota:
        even, odd = line[0::2], line[1::2]
        like = {i: max((cosine_twin(tokens[i], tokens[j]) for j in odd), default=-9.0) for i in even}
        ranked = sorted(even, key=lambda i: -like[i])
        line = ranked[min(per_round, len(line) - quota) :] + odd
    return line


@given(n=st.integers(1, 12), seed=st.integers(0, 2**31), data=st.data())
def test_vispruner_equals_a_plain_loop_for_any_count(n, seed, data) -> None:
    keep = data.draw(st.integers(1, n))
    important, per_round = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])), data.draw(st.integers(1, 4))
    signals = crops(1, 1, n, seed=seed)
    got = VisPruner(keep=keep, important=important, per_round=per_round)(signals)
    ranked = top_k_twin(signals.attention(torch.zeros(1, 1, dtype=torch.int64))[0, :, 0, 1:].mean(dim=0).tolist(), n)
    first = int(keep * important)
    diverse = thin_twin(ranked[first:], signals.get("hidden")[0, 1:], keep - first, per_round)
    assert got.order[0].tolist() == ranked[:first] + diverse


def test_lines_of_different_lengths_are_thinned_out_each_by_itself() -> None:
    like = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(2))
    like = like + like.mT
    line = torch.tensor([
        [3, 1, 4, 0, 5, 8, 2, 6, 7], [2, 0, 1, -1, -1, -1, -1, -1, -1], [5, 4, 3, 2, 1, 0, -1, -1, -1],
    ])
    quota = torch.tensor([4, 3, 0])
    got = thin_out(line, like, quota, 2)
    for i in range(3):
        own = line[i : i + 1, : int((line[i] >= 0).sum())]
        alone = thin_out(own, like[i : i + 1], quota[i : i + 1], 2)
        assert [t for t in got[i].tolist() if t >= 0] == alone[0].tolist()


def test_vispruner_refuses_shares_and_rounds_out_of_range() -> None:
    for wrong in ({"important": 1.5}, {"important": True}, {"per_round": 0}):
        with pytest.raises(DartLabError, match=next(iter(wrong))):
            VisPruner(keep=4, **wrong)


def test_scope_weighs_coverage_by_attention() -> None:
    states = torch.tensor([[[9.0, 9.0, 9.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    signals = crops(1, 2, 2, heads=1, hidden=states, attention=class_row(0.1, 0.1, 0.5, 0.3))
    assert SCOPE(keep=3)(signals).order.tolist() == [[2, 3, 0]]
    assert SCOPE(keep=3, alpha=0.0)(signals).order.tolist() == [[0, 2, 3]]  # the pair covers two
    assert SCOPE(keep=1, alpha=0.0)(signals).notes["gain"].tolist() == [[2.0]]
    with pytest.raises(DartLabError, match="alpha"):
        SCOPE(keep=3, alpha=-1)
