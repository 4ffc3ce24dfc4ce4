"""EmbedLens against a plain loop, in any chunking, with ties and margins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.roles.lens import nearest_ids


def plain(states, table, k):
    out = []
    for state in states.double():
        cosines = [float(state @ row / (state.norm() * row.norm())) for row in table.double()]
        out.append(sorted(range(len(cosines)), key=lambda i: (-cosines[i], i))[:k])
    return out


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9))
def test_equals_a_plain_loop_in_any_chunking(seed, k, chunk):
    draw = torch.Generator().manual_seed(seed)
    states, table = torch.randn(5, 4, generator=draw), torch.randn(8, 4, generator=draw)
    found = nearest_ids(states, table, k=k, rows_at_once=chunk)
    assert found.ids.tolist() == plain(states, table, k)


def test_scale_of_states_and_rows_does_not_matter():
    draw = torch.Generator().manual_seed(3)
    states, table = torch.randn(2, 7, 6, generator=draw), torch.randn(20, 6, generator=draw)
    found = nearest_ids(states, table, k=4)
    scaled = nearest_ids(states * 50, table * torch.rand(20, 1, generator=draw).add(0.1), k=4)
    assert torch.equal(found.ids, scaled.ids)
    assert found.ids.shape == (2, 7, 4)


def test_equal_rows_go_to_the_lower_id_and_show_no_margin():
    table = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    for chunk in (1, 2, 4):
        found = nearest_ids(torch.tensor([[2.0, 0.0]]), table, k=1, rows_at_once=chunk)
        assert found.ids.tolist() == [[1]]
        assert found.margin.tolist() == [0.0]


def test_all_rows_leave_no_margin_to_tell():
    assert nearest_ids(torch.ones(1, 2), torch.eye(2), k=2).margin.tolist() == [float("inf")]


def test_centring_removes_a_common_direction():
    common = torch.tensor([10.0, 0.0, 0.0])
    table = common + torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, -1.0]])
    token = common + torch.tensor([3.0, 0.0, 0.2])  # its offset points to row 1, its length does not
    assert nearest_ids(token[None], table, k=1, centred=True).ids.tolist() == [[1]]


def test_any_of_looks_at_the_first_ones_only():
    found = nearest_ids(torch.tensor([[1.0, 0.9, 0.1]]), torch.eye(3), k=3)
    assert found.ids.tolist() == [[0, 1, 2]]
    assert found.any_of([2]).tolist() == [True]
    assert found.any_of([2], top=2).tolist() == [False]
    assert found.any_of([99]).tolist() == [False]


@pytest.mark.parametrize("k", [0, 4, -1])
def test_k_must_fit_the_vocabulary(k):
    with pytest.raises(DartLabError, match="from 1 to 3"):
        nearest_ids(torch.ones(1, 3), torch.eye(3), k=k)


def test_widths_must_agree():
    with pytest.raises(DartLabError, match="4 channels and the table 3"):
        nearest_ids(torch.ones(1, 4), torch.eye(3))
