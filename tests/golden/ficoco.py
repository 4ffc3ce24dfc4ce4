"""FiCoCo's released steps: what is discarded, in which order, who receives it; the defects of its bookkeeping replayed.

The released code lets a discarded token receive, and in the vision form addresses recipients by an index that has
moved. Both are undone here from our own recipients, so that everything else is compared exactly. The pruners themselves
must rank the tokens as recorded; whom they keep and whom they let receive is theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.pruners.ficoco import local_penalty, most_redundant, recipients, unit_length
from dart_lab.pruners.ficoco_l import FiCoCoL, FiCoCoLLayer, correlate_released, filter_released
from dart_lab.pruners.ficoco_v import FiCoCoV, FiCoCoVBlock
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.windows import window_of
from tests.golden.case import Case


def run(case: Case) -> None:
    (check_vision if case.record["method"] == "ficoco_v" else check_language)(case)


def check_vision(case: Case) -> None:
    """The first step; the later ones read a buffer that outlives the image, and take a patch for the class token."""
    p, want, states, maps = case.params, case.outputs, case.inputs["x"][0], case.inputs["att_0"]
    n, r, balance = len(maps), p["r"], p["beta"]
    patches = torch.arange(n)[None] > 0
    mean, cls = maps[None, :, 1:].mean(dim=2), maps[None, 0]
    score = (1 - balance) * unit_length(mean, patches) - balance * unit_length(cls, patches)
    score, pushed = local_penalty(score, pairs_of_pairs(n - 1), 2.0)
    assert (pushed[0].nonzero()[:, 0] - 1).tolist() == sorted(want["step0_penalised_patch_ids"].tolist())
    torch.testing.assert_close(-score[0, 1:], want["step0_score_order_values"][1:], atol=1e-5, rtol=0)
    order = most_redundant(score, torch.tensor([n - 1]), patches)[0]
    gone, rest = order[:r], torch.cat([order[r:], torch.tensor([0])])
    assert torch.equal(gone, want["step0_merge_indices"]) and torch.equal(rest, want["step0_remain_indices"])
    rows = maps.softmax(dim=1)[None, gone]
    column, weight = recipients(rows, torch.ones_like(rows, dtype=torch.bool), most=2)
    assert torch.equal(column[0], want["step0_targets"])
    torch.testing.assert_close(rows.gather(2, column)[0], want["step0_top_values_of_merged"], atol=1e-5, rtol=0)
    moved = torch.where(column[0] >= n - r, column[0] - r, column[0])  # the released code's address
    out, size = add_up(states[rest], states[gone], moved, weight[0])
    torch.testing.assert_close(out / size[:, None], want["step0_out"], atol=case.record["tolerance"]["out"], rtol=0)
    torch.testing.assert_close(size, want["step0_size"], atol=1e-5, rtol=0)
    method = FiCoCoV(keep=n - 1 - r, blocks=1, balance=balance, formula="released")
    signals = Signals.of(
        visual=torch.arange(n)[None],
        attention_logits=maps[None, None],
        grid=square_grid(n - 1),
        class_token=torch.tensor([0]),
    )
    ours = FiCoCoVBlock(keep=n - 1 - r, step=0, method=method)(signals)
    assert torch.equal(ours.keep[0], want["step0_remain_indices"].sort().values)
    assert ranked(ours.score[0, 1:], r).add(1).tolist() == want["step0_merge_indices"].tolist()


def pairs_of_pairs(patches: int) -> Tensor:
    """The 2 × 2 window of every patch of a square grid, behind a class token that is in none."""
    grid = square_grid(patches)[:, 1:]
    window = window_of(Signals.of(visual=torch.arange(patches)[None], grid=grid), (2, 2))
    return torch.cat([torch.full((1, 1), PAD), window], dim=1)


def square_grid(patches: int) -> Tensor:
    """`(1, 1 + patches, 4)`: image, frame, row and column; the class token, in front, is in no row or column."""
    side, cell = int(patches**0.5), torch.arange(patches)
    grid = torch.stack([cell * 0, cell * 0, cell // side, cell % side], dim=1)
    return torch.cat([torch.tensor([[0, 0, PAD, PAD]]), grid])[None]


def ranked(score: Tensor, count: int) -> Tensor:
    """The first tokens to go, by a pruner's score (smallest first)."""
    return score.argsort(stable=True)[:count]


def check_language(case: Case) -> None:
    p, want, states, maps = case.params, case.outputs, case.inputs["x"][0], case.inputs["att_score"]
    n, text = p["v_tokens"], p["n_text"]
    visual, to_text, from_text = maps[:, :n, :n], maps[:, :n, n:].mT, maps[:, n:, :n]
    signals = Signals.of(visual=torch.arange(n)[None], attention_logits=maps[:, None])
    assert int((signals.text != -1).sum()) == text
    method = FiCoCoL(keep=n - p["r"], layers=1, balance=p["alpha"], direct=p["gamma"], formula="released")
    score = filter_released(visual, to_text, signals, method)
    allowed = torch.ones(1, n, dtype=torch.bool)
    allowed[:, 0] = not p["include_class_token"]
    gone = most_redundant(score, torch.tensor([p["r"]]), allowed)
    assert torch.equal(gone[0], want["merge_indices"])
    kept = torch.ones(n, dtype=torch.bool).index_fill(0, gone[0], False)
    assert torch.equal(kept.nonzero()[:, 0], want["remain_indices"])
    rows = correlate_released(visual, to_text, from_text, p["gamma"])[0, gone[0]]
    others = torch.arange(n) != gone[0][:, None]
    rows = rows.masked_fill(~others, float("-inf")).softmax(dim=1)[None]
    column, weight = recipients(rows, torch.ones_like(rows, dtype=torch.bool))
    assert torch.equal(column[0], want["targets"])
    torch.testing.assert_close(rows.gather(2, column)[0], want["weights_of_merged"], atol=1e-5, rtol=0)
    out, _ = add_up(states[:n], states[gone[0]], column[0], weight[0])  # what went to discarded ones is lost
    torch.testing.assert_close(out[kept], want["out"], atol=case.record["tolerance"]["out"], rtol=0)
    ours = FiCoCoLLayer(keep=method.keep, step=0, method=method)(signals)
    order = ranked(ours.score[0], n)
    order = order[allowed[0, order]]  # the released code protects the first token; the package does not
    assert order[: p["r"]].tolist() == want["merge_indices"].tolist()


def add_up(kept: Tensor, gone: Tensor, slot: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Add each discarded token, weighted, to its slots; and the weight that every slot holds."""
    out, size = kept.clone(), torch.ones(len(kept))
    for k in range(slot.shape[1]):
        out.index_add_(0, slot[:, k], weight[:, k, None] * gone)
        size.index_add_(0, slot[:, k], weight[:, k])
    return out, size
