"""The evaluation counts what the model really answers, and the model card says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

import dart_lab.mini
from dart_lab.mini import data
from dart_lab.mini.card import write_card
from dart_lab.mini.evaluate import ALL, NONE, load_network, right_answers
from dart_lab.mini.get import WEIGHTS
from dart_lab.tasks import load_task
from dart_lab.tasks.questions import Question
from dart_lab.tiny.evaluate import by_picture
from tests.mini.files import small_folder, small_trained

HOME = Path(dart_lab.mini.__file__).parent
RESULT, CARD = HOME / "evaluation.json", HOME / "MODEL_CARD.md"


@torch.inference_mode()
def test_a_question_is_judged_as_if_asked_alone(tmp_path: Path) -> None:
    """Among others behind the same picture, or by itself: the same logits decide."""
    network, tokenizer = load_network(small_folder(tmp_path, small_trained()))
    picture = load_task("shapes", n=4, seed=3, families=data.FAMILIES, questions_per_image=4)
    asked = [Question(s.family, s.question, s.answer, s.choices, ()) for s in picture]
    features = network.look(data.pixels_of([picture[0].image], 56))
    together = data.pack(tokenizer, [asked])
    alone = [network.answer(features, data.pack(tokenizer, [[question]])) for question in asked]
    assert torch.allclose(network.answer(features, together), torch.cat(alone), atol=1e-4)


def test_answers_are_counted_with_and_without_the_picture(tmp_path: Path) -> None:
    network, tokenizer = load_network(small_folder(tmp_path, small_trained()))
    groups = by_picture(list(load_task("shapes", n=6, seed=3, families=data.FAMILIES, questions_per_image=3)))
    found = right_answers(network, tokenizer, groups)
    assert set(found) == {ALL, NONE}
    assert all([len(row) for row in rows] == [len(group) for group in groups] for rows in found.values())


def test_the_card_is_written_from_the_evaluation_of_the_shipped_weights() -> None:
    result = json.loads(RESULT.read_text())
    assert CARD.read_text() == write_card(result)
    with safe_open(WEIGHTS, "pt") as file:
        sizes = [file.get_tensor(name).numel() for name in file.keys()]  # noqa: SIM118
    assert sum(sizes) == result["trained"]
    result["conditions"][ALL]["place"]["accuracy"] = 12.3
    assert "12.3 [" in write_card(result) and "12.3 [" not in CARD.read_text()
