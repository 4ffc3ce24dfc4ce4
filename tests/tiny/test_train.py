"""Training: a resumed run equals an uninterrupted one, the optimizer does what it says, the losses know the truth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dart_lab.errors import DartLabError
from dart_lab.tiny import data, losses
from dart_lab.tiny.optimizer import FlatOptimizer, orthogonalise
from dart_lab.tiny.recipe import Phase, Recipe
from dart_lab.tiny.train import CHECKPOINT, train
from dart_lab.tiny.vision import Shape

SHORT = Recipe(
    phases=(
        Phase(grid=8, images=2, questions=0, steps=2, lr=1e-3, lr_end=1e-3),
        Phase(grid=8, images=2, questions=4, steps=3, lr=1e-3, lr_end=1e-4, referent=0.4),
    ),
    shape=Shape(width=16, heads=2, vision_layers=2, vision_ff=16, layers=6, ff=16),
    ranks=1,
)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    train(SHORT, 0, tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / CHECKPOINT)
    for stop in (1, 3, None):
        train(SHORT, 0, tmp_path / "parts", stop_after=stop)
    parts = load_file(tmp_path / "parts" / CHECKPOINT)
    assert set(whole) == {"flat", "first", "second"}
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not list((tmp_path / "parts").glob("*.part"))
    with pytest.raises(DartLabError, match="seed 0, not 1"):
        train(SHORT, 1, tmp_path / "parts")


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    for seed in (0, 1):
        train(SHORT, seed, tmp_path / str(seed), stop_after=1)
    first, second = (load_file(tmp_path / name / CHECKPOINT)["flat"] for name in ("0", "1"))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("size", [(3, 8, 8), (2, 4, 12), (2, 12, 4)])
def test_orthogonalise_keeps_singular_vectors_and_levels_values(size: tuple[int, int, int]) -> None:
    stack = torch.randn(size, generator=torch.Generator().manual_seed(0))
    found = orthogonalise(stack)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.35
    u, _, v = torch.linalg.svd(stack, full_matrices=False)
    core = u.mT @ found @ v.mT  # diagonal in the singular vectors of the input
    assert (core - torch.diag_embed(core.diagonal(dim1=-2, dim2=-1))).abs().max() < 0.1


def test_the_flat_optimizer_is_adamw_away_from_the_matrices() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.LayerNorm(5), nn.Embedding(4, 5))
    theirs = nn.Sequential(nn.LayerNorm(5), nn.Embedding(4, 5))
    theirs.load_state_dict(ours.state_dict())
    ours.add_module("x_proj", nn.Linear(5, 5))  # the one matrix that the flat optimizer needs
    flat = FlatOptimizer(ours, weight_decay=0.02, clip=1e9)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.02)
    for number in range(1, 5):
        torch.manual_seed(number)
        x = torch.randn(3, 5)
        for module in (ours, theirs):
            (module[0](x) + module[1](torch.tensor([0, 1, 3]))).square().sum().backward()
        flat.step(number, 1e-2)
        reference.step()
        reference.zero_grad()
    for mine, other in zip((*ours[0].parameters(), *ours[1].parameters()), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_the_count_loss_is_zero_exactly_at_its_target() -> None:
    import numpy as np

    made = data.make_batch(
        np.random.Generator(np.random.PCG64(5)), grid=12, images=3, questions_each=6, shares=(0, 0, 0, 1, 0, 0, 0)
    )
    target = made.count_target
    share = 1 / (target.sum(dim=1, keepdim=True) + 1)
    rows = torch.full((len(target), 3 + 144 + made.text.ids.shape[1]), -torch.inf)
    rows[:, :1] = share.log()
    rows[:, 3 : 3 + 144] = (target * share).log()
    assert losses.count_loss(rows, made, 3).abs() < 1e-5
    off = rows.clone()
    off[:, 0] += 0.3
    assert losses.count_loss(off.log_softmax(dim=1), made, 3) > 1e-3
