"""FiCoCo-V and -L against plain loops; no memory of earlier pictures; what goes is not lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners import make_pruner
from dart_lab.pruners.ficoco import local_penalty, recipients
from dart_lab.pruners.ficoco_l import FiCoCoL, FiCoCoLLayer
from dart_lab.pruners.ficoco_v import FiCoCoV, FiCoCoVBlock
from dart_lab.pruners.signals import Signals
from dart_lab.testing import check_pruner

QUICK = settings(max_examples=25, deadline=None)


def maps(seed: int, n: int, heads: int = 2, *, causal: bool = False) -> Tensor:
    logits = torch.randn(1, heads, n, n, generator=torch.Generator().manual_seed(seed))
    return (
        logits.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1) if causal else logits.softmax(-1)
    )


def crop(seed: int, side: int, *, cls: bool = True) -> Signals:
    n = side * side + cls
    cell = torch.arange(side * side)
    grid = torch.stack([cell * 0, cell * 0, cell // side, cell % side], dim=1)
    grid = torch.cat([torch.tensor([[0, 0, -1, -1]]), grid]) if cls else grid
    keys = torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(seed + 1))
    attention = maps(seed, n)
    return Signals.of(
        visual=torch.arange(n)[None],
        attention=attention,
        attention_logits=attention.log(),
        keys=keys,
        grid=grid[None],
        class_token=torch.tensor([0]) if cls else None,
    )


def vision_by_loops(a: list[list[float]], side: int, gone: int) -> tuple[list[int], dict[tuple[int, int], float]]:
    """Algorithm 1 on lists; index 0 is the class token. Returns what goes and the weights (recipient, source)."""
    n = len(a) - 1
    score = {i: 0.35 * sum(a[j][i] for j in range(1, n + 1)) / n - 0.65 * a[0][i] for i in range(1, n + 1)}
    for top in range(0, side, 2):
        for left in range(0, side, 2):
            cells = [1 + r * side + c for r in range(top, min(top + 2, side)) for c in range(left, min(left + 2, side))]
            worst = max(cells, key=lambda i: (score[i], -i))
            score[worst] *= 2 if score[worst] > 0 else 0.5
    out = sorted(score, key=lambda i: (-score[i], i))[:gone]
    kept = [j for j in range(1, n + 1) if j not in out]
    alpha: dict[tuple[int, int], float] = {}
    for i in out:
        values = sorted(a[i][j] for j in kept)
        place = 0.998 * (len(kept) - 1)
        low = math.floor(place)
        cut = values[low] + (place - low) * (values[min(low + 1, len(kept) - 1)] - values[low])
        chosen = [j for j in kept if a[i][j] >= cut]
        for j in chosen:
            alpha[j, i] = a[i][j] / sum(a[i][k] for k in chosen)
    return sorted(out), alpha


@QUICK
@given(st.integers(0, 999), st.integers(2, 5), st.data())
def test_vision_form_is_the_algorithm_box(seed: int, side: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, side * side))
    signals = crop(seed, side)
    got = FiCoCoVBlock(keep=keep, step=0, method=FiCoCoV(keep=keep, blocks=1))(signals)
    mean = signals.attention(torch.arange(side * side + 1)[None])[0].mean(dim=0).tolist()
    out, alpha = vision_by_loops(mean, side, side * side - keep)
    kept = [i for i in range(side * side + 1) if i not in out]
    assert got.keep[0].tolist() == kept
    weights = got.weights()[0]
    for row, j in enumerate(kept):
        whole = 1 + sum(w for (to, _), w in alpha.items() if to == j)
        for i in range(side * side + 1):
            expected = (1 if i == j else alpha.get((j, i), 0.0)) / whole
            assert float(weights[row, i]) == pytest.approx(expected, abs=1e-5)


@QUICK
@given(st.integers(0, 999), st.integers(2, 9), st.integers(1, 4), st.data())
def test_language_form_is_the_algorithm_box(seed: int, n: int, text: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, n))
    whole = maps(seed, 2 + n + text, causal=True)
    signals = Signals.of(visual=torch.arange(2, 2 + n)[None], attention=whole)
    got = FiCoCoLLayer(keep=keep, step=0, method=FiCoCoL(keep=keep, layers=1))(signals)
    a = whole[0].mean(dim=0).double()
    image, question = range(2, 2 + n), range(2 + n, 2 + n + text)
    score = [
        0.6 * sum(float(a[j, i]) for j in image) / n - 0.4 * sum(float(a[k, i]) for k in question) / text for i in image
    ]
    order = sorted(range(n), key=lambda i: (-score[i], i))
    kept = sorted(order[n - keep :])
    assert got.keep[0].tolist() == kept
    weights = torch.eye(n, dtype=torch.float64)
    for i in order[: n - keep]:
        c = [
            0.6 * float(a[2 + i, 2 + j] + a[2 + j, 2 + i])
            + 0.4 * sum(float(a[k, 2 + i] * a[k, 2 + j]) for k in question)
            for j in range(n)
        ]
        best = max(kept, key=lambda j: (c[j], -j))  # fewer than 501 columns: one recipient
        weights[best, i] += 1
    expected = weights[kept] / weights[kept].sum(dim=1, keepdim=True)
    torch.testing.assert_close(got.weights()[0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("formula", ["paper", "released"])
@pytest.mark.parametrize("name", ["ficoco-v", "ficoco-l"])
def test_contract(name: str, formula: str) -> None:
    check_pruner(make_pruner(name, keep=4, formula=formula, **({"blocks": 2} if name == "ficoco-v" else {"layers": 2})))


def test_a_picture_gives_the_same_whether_or_not_another_came_before() -> None:
    method = FiCoCoVBlock(keep=5, step=0, method=FiCoCoV(keep=5, blocks=1))
    alone = method(crop(1, 4))
    method(crop(2, 4))
    again = method(crop(1, 4))
    assert torch.equal(alone.keep, again.keep) and torch.equal(alone.weights(), again.weights())


def test_every_discarded_token_goes_on_in_some_kept_one_and_rows_are_means() -> None:
    for signals, part in (
        (crop(5, 6), FiCoCoVBlock(keep=9, step=0, method=FiCoCoV(keep=9, blocks=1))),
        (Signals.of(visual=torch.arange(1, 31)[None], attention=maps(6, 35, causal=True)),
         FiCoCoLLayer(keep=9, step=0, method=FiCoCoL(keep=9, layers=1))),
    ):  # fmt: skip
        got = part(signals)
        assert bool(got.members().any(dim=1).all())
        torch.testing.assert_close(got.weights().sum(dim=2), torch.ones_like(got.keep, dtype=torch.float32))


def test_without_a_class_token_keys_stand_in_and_the_record_says_so() -> None:
    signals = crop(3, 4, cls=False)
    got = FiCoCoVBlock(keep=6, step=0, method=FiCoCoV(keep=6, blocks=1, penalty=1.0))(signals)
    assert got.notes["class_token"].tolist() == [False]
    keys = signals.get("keys")[0].mean(dim=0)
    a = signals.attention(torch.arange(16)[None])[0].mean(dim=0)
    term = -torch.cosine_similarity(keys, keys.mean(dim=0, keepdim=True))
    score = 0.35 * a.mean(dim=0) - 0.65 * term
    assert got.keep[0].tolist() == score.argsort(stable=True)[:6].sort().values.tolist()


def test_steps_share_what_goes() -> None:
    tower = Signals.of(
        visual=torch.arange(577)[None], hidden=torch.zeros(1, 577, 1), class_token=torch.tensor([0]),
        original=torch.tensor([577]),
    )  # fmt: skip
    left = [int(part.asked(tower)) for part in FiCoCoV(keep=115, blocks=11).parts()]
    assert left[-1] == 116 and [a - b for a, b in zip([577, *left], left, strict=False)] == [42] * 10 + [41]


def test_many_columns_take_two_recipients_and_few_take_one() -> None:
    values = torch.rand(1, 3, 577, generator=torch.Generator().manual_seed(0))
    everything = torch.ones_like(values, dtype=torch.bool)
    assert recipients(values, everything)[0].shape[2] == 2
    assert recipients(values[..., :200], everything[..., :200])[0].shape[2] == 1
    column, weight = recipients(values, everything, most=1)
    assert torch.equal(column[..., 0], values.argmax(dim=2)) and bool((weight == 1).all())


def test_the_penalty_moves_towards_being_discarded_whatever_the_sign() -> None:
    score = torch.tensor([[-1.0, -3.0, 2.0, 0.5, 0.0]])
    moved, pushed = local_penalty(score, torch.tensor([[0, 0, 1, 1, -1]]), 2.0)
    assert bool((moved >= score).all()) and pushed[0].tolist() == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"penalty": 0.5}, "at least 1"), ({"balance": 1.5}, "from 0 to 1"), ({"blocks": 0}, "at least 1"),
     ({"first": -1}, "at least 0"), ({"formula": "papr"}, "paper")],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(DartLabError, match=words):
        make_pruner("ficoco-v", keep=4, **parameters)
