"""The shipped weights: small, loadable, right on pictures they never saw, blind when nothing is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import dart_lab.tiny
from dart_lab.tasks import load_task
from dart_lab.tasks.questions import FAMILIES
from dart_lab.tiny.evaluate import (
    TASK_SEED,
    Condition,
    by_picture,
    conditions,
    foreground_tokens,
    load_network,
    right_answers,
    summary,
    template,
)
from dart_lab.tiny.network import TinyNetwork

CHECKPOINT = Path(dart_lab.tiny.__file__).parent / "checkpoint"
PICTURES = 14
LEAST = {
    "exist": 0.85,
    "attribute": 0.85,
    "relation": 0.65,
    "count": 0.6,
    "ground": 0.75,
    "text": 0.75,
    "knowledge": 0.85,
}
BLIND_AT_MOST = {
    "exist": 0.75,
    "attribute": 0.4,
    "relation": 0.75,
    "count": 0.5,
    "ground": 0.2,
    "text": 0.15,
    "knowledge": 0.4,
}


@pytest.fixture(scope="module")
def network() -> TinyNetwork:
    return load_network(CHECKPOINT)


@pytest.fixture(scope="module")
def groups() -> list:
    task = load_task("shapes", n=len(FAMILIES) * PICTURES, seed=TASK_SEED + 7, questions_per_image=len(FAMILIES))
    return by_picture(list(task))


def accuracy(groups: list, right: list[list[bool]]) -> dict[str, float]:
    return {name: value["accuracy"] / 100 for name, value in summary(groups, right).items()}


def test_the_weights_are_small_half_precision_and_all_there() -> None:
    from safetensors import safe_open

    path = CHECKPOINT / "model.safetensors"
    assert path.stat().st_size < 10_000_000
    with safe_open(path, "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
        assert all(torch.isfinite(file.get_tensor(name)).all() for name in file.keys())  # noqa: SIM118
    assert json.loads((CHECKPOINT / "generation_config.json").read_text())["do_sample"] is False


def test_accuracy_on_pictures_it_never_saw(network: TinyNetwork, groups: list) -> None:
    found = accuracy(groups, right_answers(network, groups, Condition("all", None)))
    assert all(found[family] >= least for family, least in LEAST.items()), found


def test_with_nothing_kept_after_layer_2_it_is_blind(network: TinyNetwork, groups: list) -> None:
    nothing = next(condition for condition in conditions() if condition.name == "none")
    found = accuracy(groups, right_answers(network, groups, nothing))
    assert all(found[family] <= most for family, most in BLIND_AT_MOST.items()), found


def test_stock_transformers_generates_the_same_answers(network: TinyNetwork, groups: list) -> None:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(CHECKPOINT)
    group = groups[0][3:6]
    prompts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": sample.question}]}],
            add_generation_prompt=True,
        )
        for sample in group
    ]
    inputs = processor(text=prompts, images=[s.image for s in group], padding=True, return_tensors="pt")
    given = processor.batch_decode(
        model.generate(**inputs)[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    (expected,) = right_answers(network, [group], Condition("all", None))
    assert [answer == sample.answer for answer, sample in zip(given, group, strict=True)] == expected


def test_conditions_keep_what_they_say() -> None:
    sample = load_task("shapes", n=1, seed=6)[0]
    foreground = foreground_tokens(sample)
    rng = np.random.Generator(np.random.PCG64(0))
    for condition in conditions():
        if condition.keep is not None:
            kept = condition.keep(foreground, rng)
            budget = 0 if condition.name == "none" else int(condition.name.split("@")[1])
            assert int(kept.sum()) == budget
            if condition.name.startswith("foreground"):
                assert int((kept & foreground).sum()) == min(budget, int(foreground.sum()))


def test_intervals_hold_the_mean_and_narrow_with_more_pictures(groups: list) -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    right = [[bool(rng.random() < 0.8) for _ in group] for group in groups]
    small, large = summary(groups, right)["mean"], summary(groups * 9, right * 9)["mean"]
    assert small["low"] <= small["accuracy"] <= small["high"]
    assert np.isclose(large["accuracy"], small["accuracy"])
    assert 2 < (small["high"] - small["low"]) / (large["high"] - large["low"]) < 4


def test_templates_differ_only_where_words_do() -> None:
    assert template("what color is the ring?") == template("what color is the arrow?")
    assert template("what color is the ring?") != template("which thing has the color of the ring?")
    assert template("is the red ring above the pink star?") != template("is the red ring below the pink star?")
