"""A MiniCPM-V 2.6 folder with its own code beside the weights: loaded when that is asked for, and only then."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

import dart_lab as dl
from dart_lab.errors import DartLabError
from dart_lab.pruners import DART
from tests.vlm.checkpoints import TOKENS, save_tokenizer
from tests.vlm.families import minicpm_code
from tests.vlm.families.anyres_models import picture
from tests.vlm.families.minicpm_models import minicpm_model

QUESTIONS = ["what is this?", "which of the two is larger?", "why?"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hub holds, with the places where transformers keeps a checkpoint's code put into a temporary folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    place = tmp_path / "minicpm"
    minicpm_model(vocabulary=len(TOKENS)).save_pretrained(place)
    save_tokenizer(place, "PreTrainedTokenizerFast", {})
    source = Path(minicpm_code.__file__)
    shutil.copy(source, place)
    config = json.loads((place / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": f"{source.stem}.MiniCPMVConfig", "AutoModel": f"{source.stem}.MiniCPMV"}
    (place / "config.json").write_text(json.dumps(config))
    own = {"processor_class": "MiniCPMVProcessor", "auto_map": {"AutoProcessor": f"{source.stem}.MiniCPMVProcessor"}}
    (place / "preprocessor_config.json").write_text(json.dumps(own))
    return place


def test_its_code_runs_only_when_asked_for(folder: Path) -> None:
    with pytest.raises(DartLabError, match="needs its own code; read it, then give trust_remote_code=True"):
        dl.load(folder, device="cpu")
    assert not (folder.parent / "modules").exists(), "nothing was even copied"


def test_it_answers_and_prunes(folder: Path) -> None:
    vlm = dl.load(folder, device="cpu", trust_remote_code=True)
    pictures: list[Any] = [picture((60, 40)), [picture((9, 30)), picture((20, 20))], None]
    inputs = vlm.prepare(pictures, QUESTIONS)
    found = dl.layout(vlm, inputs)
    assert [len(sample) for sample in found.samples] == [12, 24, 0]
    assert found.samples[1].image.tolist() == [0] * 12 + [1] * 12 and found.samples[1].crop.max() == 2
    answers = vlm.ask(pictures, QUESTIONS, max_new_tokens=4)
    assert answers == vlm.ask(pictures, QUESTIONS, max_new_tokens=4, batch_size=1)
    method = DART(keep=4, image_pivots=2, text_pivots=2)
    with dl.prune(vlm, method) as run:
        pruned = vlm.ask(pictures[:2], QUESTIONS[:2], max_new_tokens=4)
    with dl.prune(vlm, method) as alone:
        assert pruned == vlm.ask(pictures[:2], QUESTIONS[:2], max_new_tokens=4, batch_size=1)
    assert [kept.tolist() for kept in run.kept] == [kept.tolist() for kept in alone.kept]
    assert [len(kept) for kept in run.kept] == [4, 4]
