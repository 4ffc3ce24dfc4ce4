"""The model card says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import dart_lab.tiny
from dart_lab.tasks.questions import FAMILIES
from dart_lab.tiny.card import TARGETS, write_card

HOME = Path(dart_lab.tiny.__file__).parent


def test_the_card_is_written_from_the_evaluation() -> None:
    result = json.loads((HOME / "evaluation.json").read_text())
    assert (HOME / "checkpoint" / "MODEL_CARD.md").read_text() == write_card(result)


def test_the_shipped_weights_are_the_measured_ones_and_reach_the_targets() -> None:
    result = json.loads((HOME / "evaluation.json").read_text())
    run = result["runs"]["seed 0"]
    assert run["bytes"] == (HOME / "checkpoint" / "model.safetensors").stat().st_size
    assert all(run["conditions"]["all 576"][family]["accuracy"] >= TARGETS[family] for family in FAMILIES)
    assert all(run["conditions"]["none"][family]["low"] <= result["blind"][family]["high"] for family in FAMILIES)


def test_a_changed_number_changes_the_card() -> None:
    result = json.loads((HOME / "evaluation.json").read_text())
    before = write_card(result)
    result["runs"]["seed 0"]["conditions"]["all 576"]["count"]["accuracy"] = 12.3
    result["runs"]["seed 7"] = result["runs"]["seed 0"]
    after = write_card(result)
    assert "12.3 [" in after and "12.3 [" not in before
    assert "A second seed was not finished" in before and "Seeds measured: seed 0, seed 7." in after
