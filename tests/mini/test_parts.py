"""From parts to a model: names and numbers survive the conversion, and what is trained is what the folder answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

import dart_lab as dl
from dart_lab.errors import DartLabError
from dart_lab.mini import data
from dart_lab.mini.convert import language_state, vision_state
from dart_lab.mini.gguf import read_gguf
from dart_lab.mini.network import MiniNetwork
from dart_lab.mini.onnx import OnnxWeights, read_onnx
from dart_lab.mini.tokenizer import build_tokenizer
from dart_lab.pruners import DART, FasterVLM, FastV, ToMe, VisionZip
from dart_lab.tasks import scene
from dart_lab.tasks.questions import Question
from dart_lab.vlm import compat
from tests.mini.files import GRID, TABLE, language_gguf, small_folder, small_trained, vision_onnx

ASKED = [
    [Question("exist", "is there a red circle?", "yes", ("yes", "no"), ()),
     Question("attribute", "what color is the star?", "red", ("red",), ()),
     Question("exist", "is there a star?", "no", ("yes", "no"), ())],
    [Question("place", "where is the blue star?", "top left", ("top left",), ())],
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("mini"), small_trained())


@pytest.fixture(scope="module")
def vlm(folder: Path) -> Any:
    return dl.load(folder)


def test_the_vision_tower_s_weights_keep_their_names_and_bits() -> None:
    content, hub = vision_onnx(np.random.default_rng(0))
    state = vision_state(read_onnx(content), TABLE)
    assert torch.equal(state.pop("embeddings.position_embeddings"), torch.from_numpy(hub.pop("positions")))
    assert not state.pop("embeddings.mask_token").any()
    assert set(state) == set(hub)
    assert all(np.array_equal(state[name].numpy(), array) for name, array in hub.items())


def test_the_position_table_is_resized_as_the_model_class_does(folder: Path) -> None:
    content, _ = vision_onnx(np.random.default_rng(0))
    own, resized = (vision_state(read_onnx(content), grid)["embeddings.position_embeddings"] for grid in (TABLE, GRID))
    tower = compat.vision_tower(AutoModelForImageTextToText.from_pretrained(folder))
    embeddings = tower.embeddings
    embeddings.position_embeddings = torch.nn.Parameter(own)
    side = GRID * 14
    expected = embeddings.interpolate_pos_encoding(torch.zeros(1, 1 + GRID**2, own.shape[-1]), side, side)
    assert torch.equal(resized, expected)


def test_the_language_model_s_weights_keep_their_names_and_bits() -> None:
    content, hub = language_gguf(np.random.default_rng(0))
    state = language_state(read_gguf(content))
    assert set(state) == set(hub)
    assert all(np.array_equal(state[name].numpy(), array) for name, array in hub.items())


def test_missing_or_foreign_parts_are_refused() -> None:
    content, _ = vision_onnx(np.random.default_rng(0))
    weights = read_onnx(content)
    with pytest.raises(DartLabError, match="cls_token"):
        vision_state(OnnxWeights(), GRID)
    with pytest.raises(DartLabError, match="position table"):
        vision_state(OnnxWeights({k: v for k, v in weights.tensors.items() if "Reshape" not in k}), GRID)
    gguf = read_gguf(language_gguf(np.random.default_rng(0))[0])
    gguf.tensors["blk.0.attn_q.bias"] = np.zeros(3, dtype=np.float32)
    with pytest.raises(DartLabError, match=r"attn_q\.bias"):
        language_state(gguf)
    with pytest.raises(DartLabError, match="tokenizer"):
        build_tokenizer({"tokenizer.ggml.model": "llama"})


def test_the_folder_loads_whole(folder: Path) -> None:
    _, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_packed_questions_are_answered_as_the_folder_answers_them_one_by_one(folder: Path, vlm: Any) -> None:
    """Mask, positions, prompt, tokens, adapters and their merge: all of the training against stock transformers."""
    images = [scene.compose(np.random.default_rng(i)).image for i in range(2)]
    network = MiniNetwork(_untrained(folder), torch.float32)
    network.load_state_dict(small_trained())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    packed = data.pack(tokenizer, ASKED)
    with torch.inference_mode():
        features = network.look(data.pixels_of(images, GRID * 14))
        logits = network.answer(features, packed)
        rows = []
        for image, asked in zip(images, ASKED, strict=True):
            for question in asked:
                inputs = vlm.prepare([image], [question.text])
                answer = tokenizer.encode(question.answer + data.END).ids
                ids = torch.cat([inputs["input_ids"], torch.tensor([answer])], dim=1)
                out = vlm.model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0]
                rows.append(out[-len(answer) - 1 : -1])
    expected = torch.cat(rows)
    assert packed.target[packed.target >= 0].tolist() == [
        token for asked in ASKED for q in asked for token in tokenizer.encode(q.answer + data.END).ids
    ]
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
    assert expected.std() > 0.5


def test_the_adapters_change_the_answers(folder: Path, vlm: Any) -> None:
    inputs = vlm.prepare([None], ["is there a red circle?"])
    with torch.inference_mode():
        gap = F.mse_loss(vlm.model(**inputs).logits, _untrained(folder)(**inputs).logits)
    assert gap > 1e-3


@pytest.mark.parametrize(
    ("pruner", "left"),
    [
        (DART(keep=5), 5),
        (FastV(keep=5), 5),
        (FasterVLM(keep=5), 5),
        (ToMe(keep=5, blocks=2), 5),
        (VisionZip(keep=5), 4),
    ],
)
def test_methods_prune_it_and_keeping_all_changes_nothing(vlm: Any, pruner: Any, left: int) -> None:
    """The class token that VisionZip keeps is one of its five."""
    images = [scene.compose(np.random.default_rng(i)).image for i in range(2)]
    inputs = vlm.prepare(images, ["is there a star?", "where is the red circle?"])
    with torch.inference_mode():
        plain = vlm.model(**inputs).logits
        with dl.prune(vlm, pruner) as run:
            pruned = vlm.model(**inputs).logits
        assert [len(kept) for kept in run.kept] == [left, left]
        assert not torch.equal(pruned[:, -1], plain[:, -1])
        if not isinstance(pruner, VisionZip):
            with dl.prune(vlm, replace(pruner, keep=GRID**2)):
                assert torch.equal(vlm.model(**inputs).logits, plain)


def test_merging_inside_the_tower_is_the_same_on_eager(folder: Path, vlm: Any) -> None:
    """Proportional attention: what was merged adds the log of its size to the logits, whatever the kernel."""
    inputs = vlm.prepare([scene.compose(np.random.default_rng(0)).image], ["is there a star?"])
    eager = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    kept, logits = [], []
    for model in (vlm.model, eager):
        with torch.inference_mode(), dl.prune(model, ToMe(keep=5, blocks=2)) as run:
            logits.append(model(**inputs).logits)
        kept.append(run.kept[0].tolist())
    assert kept[0] == kept[1]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


def test_class_token_methods_read_the_tower_s_own_attention(vlm: Any) -> None:
    """FasterVLM's kept patches are those that the class token attends to most, by the model's eager weights."""
    inputs = vlm.prepare([scene.compose(np.random.default_rng(0)).image], ["is there a star?"])
    eager = AutoModelForImageTextToText.from_pretrained(vlm.folder, attn_implementation="eager")
    with torch.inference_mode():
        found = compat.vision_tower(eager)(inputs["pixel_values"], output_attentions=True).attentions
        with dl.prune(vlm, FasterVLM(keep=5)) as run:
            vlm.model(**inputs)
    block = len(found) - 2
    best = found[block][0, :, 0, 1:].mean(dim=0).topk(5).indices
    assert run.kept[0].tolist() == sorted(best.tolist())


def test_the_layout_counts_the_patches_alone(vlm: Any) -> None:
    inputs = vlm.prepare([scene.compose(np.random.default_rng(0)).image], ["is there a star?"])
    tokens = dl.layout(vlm, inputs).samples[0]
    assert (len(tokens), int(tokens.row.max()), int(tokens.column.max())) == (GRID**2, GRID - 1, GRID - 1)


def _untrained(folder: Path) -> Any:
    """The folder's model without adapters and projector, as the training begins with."""
    gguf = read_gguf(language_gguf(_rng())[0])
    model = AutoModelForImageTextToText.from_pretrained(folder)
    text = compat.text_model(model)
    text.load_state_dict(language_state(gguf))
    return model


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)
