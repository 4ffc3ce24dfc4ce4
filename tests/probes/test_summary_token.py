"""The summary-token score against the plain product, where that still fits, and beyond."""

from __future__ import annotations

import math

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.probes.summary_token import summary_token


def answer(n: int, heads: int = 3, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(2, heads, n, n, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(dim=-1)


@pytest.mark.parametrize("own", [True, False])
def test_equals_the_product_of_each_column(own: bool) -> None:
    attention = answer(7)
    found = summary_token(attention, own=own)
    for b in range(2):
        rows = attention[b].double().amax(dim=0)
        rows = rows / rows.sum(dim=1, keepdim=True)
        for j in range(7):
            product = math.prod(float(50 * rows[i, j]) for i in range(j if own else j + 1, 7))
            assert float(found.score[b, j]) == pytest.approx(math.log(product), abs=1e-4)
    assert torch.equal(found.token, found.score.argmax(dim=1))


def test_a_planted_summary_token_is_found_in_a_long_answer() -> None:
    """At 400 tokens the products leave float32; the logarithms do not."""
    attention = answer(400)
    attention[:, :, 31:, 30] += 2.0
    found = summary_token(attention)
    assert found.token.tolist() == [30, 30] and bool(found.score.isfinite().all())


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(DartLabError, match="expected"):
        summary_token(torch.zeros(1, 2, 3, 4))
    with pytest.raises(DartLabError, match="above 0"):
        summary_token(answer(3), scale=0)
