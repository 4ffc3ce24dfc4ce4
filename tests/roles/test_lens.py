"""EmbedLens against a plain loop, in any chunking, with ties and margins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.roles.lens import ids_covering, nearest_ids, table_hubness


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


def test_csls_equals_its_definition_and_takes_the_lead_from_hubs() -> None:
    """One row of the table points at everything; after CSLS each token finds its own row."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(60, 16, generator=generator) + 2.0
    table = torch.cat([torch.ones(1, 16) * 2, pool[:20] + 0.5 * torch.randn(20, 16, generator=generator)])
    hubness = table_hubness(table, pool, k=5, rows_at_once=3)
    cosine = torch.nn.functional.normalize(pool, dim=1) @ torch.nn.functional.normalize(table, dim=1).mT
    assert torch.allclose(hubness, cosine.topk(5, dim=0).values.mean(dim=0))
    near_pool = cosine.topk(5, dim=1).values.mean(dim=1, keepdim=True)
    csls = 2 * cosine - near_pool - hubness
    found = nearest_ids(pool, table, k=3, hubness=hubness, rows_at_once=4)
    assert torch.equal(found.ids, csls.argsort(dim=1, descending=True, stable=True)[:, :3])
    plain = nearest_ids(pool, table, k=1)
    assert int((plain.ids == 0).sum()) > int((found.ids[:, 0] == 0).sum())
    assert ids_covering(plain.ids) < ids_covering(found.ids[:, 0])


def test_a_hubness_of_another_table_is_refused() -> None:
    with pytest.raises(DartLabError, match="one number a row"):
        nearest_ids(torch.eye(2), torch.eye(2), k=1, hubness=torch.zeros(3))
    with pytest.raises(DartLabError, match="expected"):
        table_hubness(torch.eye(2), torch.empty(0, 2))
