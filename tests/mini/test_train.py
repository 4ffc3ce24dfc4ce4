"""Training: a resumed run equals an uninterrupted one; the start shows the words; questions do not see each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from dart_lab.errors import DartLabError
from dart_lab.mini import data, start
from dart_lab.mini.network import MiniNetwork, Packed
from dart_lab.mini.train import CHECKPOINT, Phase, Recipe, loss_of, some, train
from tests.mini.files import small_folder, small_trained

SIDE = 56
SHORT = Recipe(
    phases=(Phase(112, SIDE, 2, 1e-3, 1e-3, shown=0.5), Phase(336, 28, 2, 1e-3, 1e-4)),
    pictures=1,
    questions=3,
    warmup=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("mini"), small_trained())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PICTURES", {SIDE: 12})
    monkeypatch.setattr(start, "STEPS", 60)


def test_a_resumed_run_ends_with_the_same_weights(
    folder: Path, tokenizer: Any, tmp_path: Path, quick_start: None
) -> None:
    def run(name: str, stop: int | None, seed: int = 0) -> None:
        model = AutoModelForImageTextToText.from_pretrained(folder)
        train(model, tokenizer, tmp_path / name, seed=seed, recipe=SHORT, stop_after=stop)

    run("whole", None)
    whole = load_file(tmp_path / "whole" / CHECKPOINT)
    for stop in (0, 1, 3, None):
        run("parts", stop)
    parts = load_file(tmp_path / "parts" / CHECKPOINT)
    assert {name.split(".")[0] for name in whole} == {"value", "first", "second"}
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert any(tensor.any() for name, tensor in whole.items() if name.startswith("value") and "lora_b" in name)
    assert not list((tmp_path / "parts").glob("*.part"))
    with pytest.raises(DartLabError, match="seed 0, not 1"):
        run("parts", None, seed=1)


def test_the_start_learns_what_patches_show(folder: Path, tokenizer: Any, quick_start: None) -> None:
    torch.manual_seed(0)
    network = MiniNetwork(AutoModelForImageTextToText.from_pretrained(folder), torch.float32)
    left = start.fit(network, tokenizer, np.random.default_rng(0))
    assert left["after steps"] < left["closed form"] < 1


def test_what_is_trained_is_the_projector_and_the_adapters(folder: Path, tokenizer: Any) -> None:
    network = MiniNetwork(AutoModelForImageTextToText.from_pretrained(folder), torch.float32)
    assert set(dict(network.named_parameters())) == set(small_trained())
    drawn = data.draw(np.random.default_rng(0), 2, 5)
    packed = data.pack(tokenizer, [asked for _, asked in drawn])
    features = network.look(data.pixels_of([picture.image for picture, _ in drawn], SIDE))
    loss, right = loss_of(network, features, packed)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for n, p in network.named_parameters() if "lora_a" not in n)
    assert [len(row) for row in right] == [len(asked) for _, asked in drawn]


def test_an_answer_is_right_only_with_all_its_tokens(folder: Path, tokenizer: Any, monkeypatch: Any) -> None:
    network = MiniNetwork(AutoModelForImageTextToText.from_pretrained(folder), torch.float32)
    drawn = data.draw(np.random.default_rng(0), 1, 4)
    packed = data.pack(tokenizer, [drawn[0][1]])
    wanted = packed.target[packed.target >= 0]
    logits = torch.zeros(len(wanted), int(wanted.max()) + 1)
    logits[torch.arange(len(wanted)), wanted] = 1
    logits[-1] = logits[-1].flip(0)  # the end of the last answer comes out wrong
    monkeypatch.setattr(network, "answer", lambda *given: logits)
    assert loss_of(network, torch.empty(0), packed)[1] == [[True, True, True, False]]


def test_the_questions_are_of_the_three_families_and_differ() -> None:
    for _, asked in data.draw(np.random.default_rng(1), 3, 9):
        assert len({question.text for question in asked}) == len(asked) > 5
        assert {question.family for question in asked} == set(data.FAMILIES)


def test_a_run_may_go_on_from_exported_weights(
    folder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file({name: tensor.half() for name, tensor in small_trained().items()}, weights)
    monkeypatch.setattr(start, "fit", None)  # nothing is fitted
    model = AutoModelForImageTextToText.from_pretrained(folder)
    more = replace(SHORT, half=True)
    network = train(model, tokenizer, tmp_path / "run", seed=1, recipe=more, begin=weights, stop_after=0)
    begun = load_file(weights)
    assert all(torch.equal(tensor, begun[name].float()) for name, tensor in network.state_dict().items())
    network = train(
        AutoModelForImageTextToText.from_pretrained(folder), tokenizer, tmp_path / "run", seed=1, recipe=more
    )
    moved = [name for name, tensor in network.state_dict().items() if not torch.equal(tensor, begun[name].float())]
    assert set(moved) == set(begun) and all(tensor.isfinite().all() for tensor in network.state_dict().values())


def test_tokens_that_are_shown_stand_at_their_places(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an answer sees of a part of the tokens is what it would see with the others masked."""
    network = MiniNetwork(AutoModelForImageTextToText.from_pretrained(folder), torch.float32)
    drawn = data.draw(np.random.default_rng(0), 1, 3)
    packed = data.pack(tokenizer, [drawn[0][1]])
    features = network.look(data.pixels_of([drawn[0][0].image], SIDE))
    whole = features.shape[1]
    shown = some(1, whole, 0.5, np.random.default_rng(0))
    assert shown is not None and shown.shape == (1, round(whole / 2)) and (shown.diff() > 0).all()
    part = network.answer(features.gather(1, shown[:, :, None].expand(-1, -1, features.shape[2])), packed, shown, whole)
    hidden = torch.ones(whole, dtype=torch.bool)
    hidden[shown[0]] = False
    lead = len(packed.before)
    masks = packed.mask(whole)
    masks[..., lead : lead + whole] &= ~hidden | torch.eye(masks.shape[-1], dtype=torch.bool)[:, lead : lead + whole]
    monkeypatch.setattr(Packed, "mask", lambda self, visual: masks)
    assert torch.allclose(network.answer(features, packed), part, atol=1e-4)
    assert some(1, whole, 1, np.random.default_rng(0)) is None
