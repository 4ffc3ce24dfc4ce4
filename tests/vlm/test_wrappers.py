"""Methods made of others, inside a model: dropping equals masking, and a schedule equals masks that grow."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import pytest
import torch

from dart_lab.errors import DartLabWarning
from dart_lab.pruners import DART, FastV, Protect, Pruner, Random, Schedule, Then, UniformGrid, Union, Windowed
from dart_lab.vlm.insert import prune
from dart_lab.vlm.masking import mask_drop
from tests.vlm.common import IMAGE, ONE, THREE, TOKENS, batch, compare_with_mask, small_llava
from tests.vlm.stepping import decode

FIRST_ROW = torch.arange(2 * TOKENS) < 4


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("method", [
    Windowed(FastV(keep=0.25), windows=(2, 2)), Union(FastV(keep=3), UniformGrid(keep=0.2)),
    Then(UniformGrid(keep=0.5), DART(keep=4)),
    Protect(DART(keep=0.3), mask=FIRST_ROW), Protect(FastV(keep=0.3), mask=FIRST_ROW, overflow="additive"),
], ids=lambda method: method.name)
def test_dropping_equals_masking(method: Pruner, images: tuple[int, ...]) -> None:
    if isinstance(method, Protect):
        method = Protect(method.pruner, mask=FIRST_ROW[: TOKENS * max(images)], overflow=method.overflow)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DartLabWarning)  # the windows must know where the tokens lie
        worst, run, _ = compare_with_mask(small_llava(), batch(images), method, steps=4)
    assert worst <= 1e-5
    if isinstance(method, Protect):
        assert all(set(range(4)) <= set(kept.tolist()) for kept in run.kept)


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_a_schedule_equals_masks_that_grow(images: tuple[int, ...]) -> None:
    model, inputs = small_llava(), batch(images)
    schedule = Schedule({1: FastV(keep=0.5), 2: DART(keep=0.25), 3: Random(keep=2)})
    with prune(model, schedule) as run:
        dropped = decode(model, inputs, 4)
    assert run.got == [2] * len(images)
    hidden = []
    for stage in range(3):
        columns = inputs["input_ids"] == IMAGE
        for row, sample in enumerate(run.samples):
            places = columns[row].nonzero()[:, 0]
            assert len(sample.decisions[stage].kept) == [len(places) // 2, len(places) // 4, 2][stage]
            columns[row, places[torch.from_numpy(sample.decisions[stage].kept)]] = False
        hidden.append(columns)
    with ExitStack() as masks:
        for layer, columns in enumerate(hidden, start=1):
            masks.enter_context(mask_drop(model, columns, layer=layer))
        masked = decode(model, inputs, 4, forced=dropped.tokens)
    rows = ~hidden[2] & inputs["attention_mask"].bool()
    assert torch.allclose(dropped.prompt[rows], masked.prompt[rows], atol=1e-5)
    for ours, theirs in zip(dropped.logits, masked.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
