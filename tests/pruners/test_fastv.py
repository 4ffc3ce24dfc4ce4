"""FastV and FastV_VIS: hand-made maps, query sets, rounding, invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import FastV, FastVVis, Signals
from tests.twins import top_k_twin


def signals_of(attention: torch.Tensor, visual: range) -> Signals:
    return Signals.of(visual=torch.tensor([list(visual)]), attention=attention)


def causal(length: int, heads: int = 4, seed: int = 0) -> torch.Tensor:
    scores = torch.randn(1, heads, length, length, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)


def test_last_and_mean_query_give_their_own_orders() -> None:
    """A 6×6 map: one text token, three visual ones, two text tokens; the last one and the mean disagree."""
    attention = torch.zeros(1, 1, 6, 6)
    attention[0, 0, 4, 1:4] = torch.tensor([0.9, 0.0, 0.1])
    attention[0, 0, 5, 1:4] = torch.tensor([0.1, 0.2, 0.3])
    signals = signals_of(attention, range(1, 4))
    assert FastV(keep=3)(signals).order.tolist() == [[2, 1, 0]]
    assert FastV(keep=3, query="mean")(signals).order.tolist() == [[0, 2, 1]]
    assert FastV(keep=3, query=(0,))(signals).order.tolist() == [[0, 2, 1]]
    assert FastV(keep=3, query=(0, -1))(signals).order.tolist() == [[0, 2, 1]]
    torch.testing.assert_close(FastV(keep=3, query="mean")(signals).score, torch.tensor([[0.5, 0.1, 0.2]]))


@given(n=st.integers(1, 12), keep=st.integers(1, 12), seed=st.integers(0, 99))
def test_equals_a_plain_ranking(n, keep, seed) -> None:
    keep = min(n, keep)
    attention = causal(n + 5, seed=seed)
    got = FastV(keep=keep)(signals_of(attention, range(2, 2 + n)))
    received = [sum(float(attention[0, head, -1, s]) for head in range(4)) / 4 for s in range(2, 2 + n)]
    assert got.order[0].tolist() == top_k_twin(received, keep)


def test_adding_a_constant_changes_nothing() -> None:
    attention = torch.randint(0, 64, (1, 4, 20, 20), generator=torch.Generator().manual_seed(0)) / 256
    plain = FastV(keep=6)(signals_of(attention, range(3, 15)))
    shifted = attention.clone()
    shifted[:, :, :, 3:15] += 0.5
    assert torch.equal(plain.order, FastV(keep=6)(signals_of(shifted, range(3, 15))).order)


def test_fastv_vis_cannot_see_the_question() -> None:
    attention = causal(20)
    other = attention.clone()
    other[:, :, 15:] = causal(20, seed=1)[:, :, 15:]  # rows of the text after the image
    want = FastVVis(keep=5)(signals_of(attention, range(3, 15)))
    assert torch.equal(want.keep, FastVVis(keep=5)(signals_of(other, range(3, 15))).keep)
    row = attention[0, :, 14, 3:15].mean(dim=0)
    assert want.order[0].tolist() == row.argsort(descending=True)[:5].tolist()
    assert not torch.equal(
        FastV(keep=5)(signals_of(attention, range(3, 15))).keep, FastV(keep=5)(signals_of(other, range(3, 15))).keep
    )


def test_mean_without_a_question_is_the_last_token() -> None:
    attention = causal(15)
    signals = signals_of(attention, range(3, 15))
    assert torch.equal(FastV(keep=4, query="mean")(signals).keep, FastVVis(keep=4)(signals).keep)


def test_rows_with_and_without_a_question_share_a_batch() -> None:
    attention = causal(20).expand(2, -1, -1, -1)
    visual = torch.stack([torch.arange(3, 15), torch.arange(8, 20)])
    got = FastV(keep=4, query="mean")(Signals.of(visual=visual, attention=attention))
    for row in range(2):
        alone = FastV(keep=4, query="mean")(Signals.of(visual=visual[row, None], attention=attention[:1]))
        assert torch.equal(got.keep[row], alone.keep[0])


@pytest.mark.parametrize(("parameters", "n", "kept"), [
    ({"reduction_ratio": 0.778}, 576, 128),  # the code for Hugging Face models
    ({"reduction_ratio": 0.778, "rounding": "int"}, 576, 127),  # EPIC
    ({"keep": 0.5, "rounding": "int"}, 391, 195),  # lmms-eval
    ({"keep": 0.5}, 25, 12),  # half to even
    ({"keep": 0.5}, 27, 14),
    ({"keep": 144}, 576, 144),
])
def test_official_rounding(parameters, n, kept) -> None:
    signals = signals_of(torch.rand(1, 2, 1, n + 3).expand(-1, -1, n + 3, -1), range(1, n + 1))
    assert FastV(budget="official", **parameters)(signals).counts.tolist() == [kept]
    if "keep" in parameters:  # the exact budget rounds half up
        exact = FastV(keep=parameters["keep"])(signals).counts.tolist()
        assert exact == [kept if isinstance(parameters["keep"], int) else int(n * parameters["keep"] + 0.5)]


@pytest.mark.parametrize(("parameters", "text"), [
    ({"keep": 4, "query": "lst"}, "Did you mean 'last'"),
    ({"keep": 4, "query": ()}, "at least one place"),
    ({"keep": 4, "query": (1.5,)}, "at least one place"),
    ({"keep": 4, "rounding": "floor"}, "Known: int, round"),
    ({"keep": 4, "reduction_ratio": 0.5, "budget": "official"}, "exactly one of keep, reduction_ratio"),
    ({"reduction_ratio": 0.75}, "keep=0.25"),
])
def test_wrong_parameters_are_refused(parameters, text) -> None:
    with pytest.raises(DartLabError, match=text):
        FastV(**parameters)


def test_a_place_outside_the_question_is_refused() -> None:
    with pytest.raises(DartLabError, match="has 2 tokens"):
        FastV(keep=1, query=(2,))(signals_of(causal(8), range(2, 6)))
