"""Losses, gradients and hidden states through a pruned model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dart_lab.pruners import DART, KeepAll, Pruner, Reduction, UniformGrid
from dart_lab.vlm.insert import prune
from dart_lab.vlm.masking import mask_drop
from tests.vlm.common import ONE, THREE, TOKENS, Uneven, batch, hidden_columns, in_float64, small_llava


def labels_of(inputs: dict[str, Tensor], answer: int) -> Tensor:
    """The last `answer` tokens of each prompt are to be predicted."""
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, -answer:] = inputs["input_ids"][:, -answer:]
    return labels


def test_loss_equals_masking() -> None:
    model, inputs = small_llava(), batch(THREE, answer=4)
    labels = labels_of(inputs, 4)
    with prune(model, Uneven()) as run, torch.no_grad():
        ours = model(**inputs, labels=labels)
    with mask_drop(model, hidden_columns(model, inputs, run), layer=2), torch.no_grad():
        theirs = model(**inputs, labels=labels)
    assert ours.logits.shape == theirs.logits.shape
    torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([-5, -2])], ids=["1", "3", "tensor"])
def test_logits_to_keep(kept: Any) -> None:
    model, inputs = small_llava(), batch(THREE)
    with prune(model, Uneven()), torch.no_grad():
        whole = model(**inputs).logits
        some = model(**inputs, logits_to_keep=kept).logits
    torch.testing.assert_close(some, whole[:, -kept:] if isinstance(kept, int) else whole[:, kept], atol=1e-6, rtol=0)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "again"])
def test_hidden_states_are_short_from_k_on(warm: bool) -> None:
    model, inputs = small_llava(), batch(ONE)
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        plain = model(**inputs, output_hidden_states=True).hidden_states if warm else None
        with prune(model, DART(keep=5)):
            states = model(**inputs, output_hidden_states=True).hidden_states
    short = length - TOKENS + 5
    assert [state.shape[1] for state in states] == [length, length, length, short, length]
    if plain is not None:
        for ours, theirs in zip(states[:3], plain[:3], strict=True):
            assert torch.equal(ours, theirs)


def test_gradient_is_the_directional_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = in_float64(small_llava(), monkeypatch), batch(THREE, answer=4)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]

    def loss() -> Tensor:
        with prune(model, UniformGrid(keep=0.25)):  # the kept set does not move with the weights
            logits = model(**inputs).logits[:, -5:-1]  # the model's own loss is float32
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["input_ids"][:, -4:].flatten())

    loss().backward()
    slope = sum(float((p.grad * d).sum()) for p, d in zip(parameters, direction, strict=True) if p.grad is not None)
    step = 1e-6
    with torch.no_grad():
        ends = []
        for sign in (1, -2):  # forward by one step, then back by two
            for p, d in zip(parameters, direction, strict=True):
                p.add_(sign * step * d)
            ends.append(float(loss()))
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)
    assert abs(slope) > 1e-3


class Counting(UniformGrid):
    """Counts how often it is asked."""

    def reduce(self, *args: Any) -> Reduction:
        object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
        return super().reduce(*args)


class CountingAll(KeepAll):
    def reduce(self, *args: Any) -> Reduction:
        object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
        return super().reduce(*args)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["uniform", "all"])
def test_checkpointing_changes_no_gradient(kind: str, reentrant: bool) -> None:
    inputs = batch(THREE, answer=4)
    labels = labels_of(inputs, 4)

    def gradients(checkpointing: bool) -> tuple[list[Tensor], int]:
        model = small_llava().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        pruner: Pruner = Counting(keep=0.25) if kind == "uniform" else CountingAll()
        with prune(model, pruner):
            model(**inputs, labels=labels, use_cache=False).loss.backward()
        text = model.model.language_model
        return [p.grad for p in text.layers.parameters()], pruner.calls

    plain, asked = gradients(False)
    saved, asked_again = gradients(True)
    assert asked == asked_again == 1
    for one, other in zip(plain, saved, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)
