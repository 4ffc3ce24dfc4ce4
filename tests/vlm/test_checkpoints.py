"""Folders as the hub holds them, of every family, give a model that answers, with the official processor's inputs."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer
from transformers.utils import is_torchvision_available

import dart_lab as dl
from dart_lab.vlm import compat
from dart_lab.vlm.vlm import VLM
from tests.vlm.checkpoints import CHECKPOINTS, save_checkpoint

QUESTIONS = ["what is this?", "which of the two pictures is larger?", "why?"]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


PICTURES: list[Any] = [picture(60, 40), [picture(30, 30, 1), picture(20, 50, 2)], None]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp("hub") / request.param)


@pytest.fixture(scope="module")
def vlm(folder: Path) -> VLM:
    return dl.load(folder, device="cpu")


def official(folder: Path) -> Any:
    """The official class, built from its parts; its video processor can do nothing, nor what spells numbers."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    own = folder / "processor_config.json"
    named = json.loads(own.read_text()) if own.exists() else {}
    kind = getattr(transformers, settings.pop("processor_class"))
    pictures = settings.pop("image_processor_type").removesuffix("Fast")
    pil = getattr(transformers, pictures + "Pil", None) or getattr(transformers, pictures)
    pil = compat.hidden_image_processor(pictures) or pil
    if "min_pixels" in inspect.signature(pil.__init__).parameters and "shortest_edge" in settings.get("size", {}):
        settings |= {"min_pixels": settings["size"]["shortest_edge"], "max_pixels": settings["size"]["longest_edge"]}
    taken = inspect.signature(kind.__init__).parameters
    parts = {name: value for name, value in named.items() if name in taken}
    if "video_processor" in taken:
        parts["video_processor"] = SimpleNamespace(num_frames=1, fps=1)
    template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        if hasattr(sys.modules[kind.__module__], "num2words"):
            patch.setattr(sys.modules[kind.__module__], "num2words", str)
        return kind(image_processor=pil(**settings), tokenizer=tokenizer, chat_template=template, **parts)


def test_these_tests_run_without_torchvision() -> None:
    assert not is_torchvision_available()


def test_a_prepared_batch_is_what_the_official_processor_makes(vlm: VLM, folder: Path) -> None:
    if vlm.model.config.model_type == "smolvlm" and transformers.__version__.startswith(("4.", "5.0.")):
        with pytest.raises(ModuleNotFoundError):
            official(folder)
        pytest.skip("this release of transformers cannot import SmolVLM's own processor without torchvision")
    processor = official(folder)
    texts = []
    for pictures, question in zip(PICTURES, QUESTIONS, strict=True):
        count = 0 if pictures is None else len(pictures) if isinstance(pictures, list) else 1
        content = [{"type": "image"}] * count + [{"type": "text", "text": question}]
        texts.append(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))
    nested = [PICTURES[0:1], PICTURES[1], []]
    expected = processor(images=nested, text=texts, return_tensors="pt", padding=True)
    inputs = vlm.prepare(PICTURES, QUESTIONS)
    assert inputs.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(inputs[name], value), name


def test_the_forward_gets_all_that_it_takes(vlm: VLM) -> None:
    taken = inspect.signature(type(vlm.model).forward).parameters
    inputs = vlm.prepare(PICTURES[:2], QUESTIONS[:2])
    by_hand = vlm.family.visual_mask(vlm.model, inputs["input_ids"])
    assert ("mm_token_type_ids" in inputs) == ("mm_token_type_ids" in taken)
    if "mm_token_type_ids" in inputs:
        assert torch.equal(inputs["mm_token_type_ids"].bool(), by_hand)
    assert [len(each) for each in dl.layout(vlm.model, inputs).samples] == by_hand.sum(dim=1).tolist()
    with torch.no_grad():
        assert vlm.model(**inputs).logits.isfinite().all()


def test_token_types_that_no_model_takes_are_left_out(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["input_ids", "token_type_ids", "attention_mask"]
    monkeypatch.setattr(vlm.processor.tokenizer, "model_input_names", names)
    assert "token_type_ids" not in vlm.prepare(PICTURES[:1], QUESTIONS[:1])


def test_it_answers_and_prunes(vlm: VLM) -> None:
    from dart_lab.pruners import DART

    together = vlm.ask(PICTURES, QUESTIONS, max_new_tokens=4)
    assert together == vlm.ask(PICTURES, QUESTIONS, max_new_tokens=4, batch_size=1)
    method = DART(keep=4, image_pivots=2, text_pivots=2)
    with dl.prune(vlm, method) as run:
        pruned = vlm.ask(PICTURES[:2], QUESTIONS[:2], max_new_tokens=4)
    with dl.prune(vlm, method) as alone:
        assert pruned == vlm.ask(PICTURES[:2], QUESTIONS[:2], max_new_tokens=4, batch_size=1)
    for row, kept in enumerate(run.kept):
        assert len(kept) == 4 and kept.tolist() == alone.kept[row].tolist()
