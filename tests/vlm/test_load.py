"""`load` gives a working model or one line of help; `prepare` builds whole, left-padded prompts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import dart_lab as dl
from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.vlm.prompts import build_prompts
from dart_lab.vlm.vlm import VLM
from tests.models import llava_processor, tiny_llava

GRID = 6
VISUAL = GRID * GRID


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava(tmp_path_factory.mktemp("models") / "random-llava", grid=GRID, kv_heads=2)


@pytest.fixture(scope="module")
def vlm(folder: Path) -> VLM:
    return dl.load(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def noise(seed: int = 0, width: int = 100, height: int = 80) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def one_line(action: Callable[[], Any]) -> str:
    with pytest.raises(DartLabError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


# what load gives

def test_loaded_weights_are_the_saved_ones(vlm: VLM, folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    loaded = vlm.model.state_dict()
    matched = {name: next(key for key in loaded if key.endswith(name.split("language_model.")[-1].split("model.")[-1]))
               for name in saved}
    assert all(torch.equal(saved[name], loaded[key]) for name, key in matched.items() if "layers.3" in name)
    assert not vlm.model.training
    assert vlm.processor.tokenizer.padding_side == "left"


def test_the_packaged_model_loads_offline_and_has_576_visual_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    tiny = dl.load("tiny")
    inputs = tiny.prepare([noise()], ["is there a red circle?"])
    assert len(dl.layout(tiny, inputs).samples[0]) == 576
    assert tiny.model.dtype == torch.float32


def test_dtype_auto_is_the_checkpoints_own_but_never_half_on_a_cpu(folder: Path, copy: Path) -> None:
    for saved, expected in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        dl.load(folder).model.to(saved).save_pretrained(copy)
        assert dl.load(copy, device="cpu").model.dtype == expected
    assert dl.load(copy, dtype="float64").model.dtype == torch.float64
    assert dl.load(copy, dtype=torch.float16).model.dtype == torch.float16


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dl.load(folder)
    assert capfd.readouterr() == ("", "")


# what load refuses

def test_bad_names_get_one_line(tmp_path: Path) -> None:
    assert "Did you mean 'tiny'?" in one_line(lambda: dl.load("tinny"))
    assert "no such folder" in one_line(lambda: dl.load("./nowhere"))
    assert "no such folder" in one_line(lambda: dl.load(tmp_path / "nowhere"))
    assert "name is empty" in one_line(lambda: dl.load(""))
    assert "names no model" in one_line(lambda: dl.load(3))  # type: ignore[arg-type]
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is a file" in one_line(lambda: dl.load(file))


def test_folders_that_lack_something_are_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "pickled" in one_line(lambda: dl.load(copy))
    (copy / "pytorch_model.bin").unlink()
    assert "no weights" in one_line(lambda: dl.load(copy))
    (copy / "config.json").write_text("{")
    assert "not valid JSON" in one_line(lambda: dl.load(copy))
    (copy / "config.json").unlink()
    assert "no config.json" in one_line(lambda: dl.load(copy))


def test_unsupported_model_types_list_the_supported_ones(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    for model_type, words in (("lava", "Did you mean 'llava'?"), ("bert", "Known: "), (None, "model_type is nothing")):
        config["model_type"] = model_type
        (copy / "config.json").write_text(json.dumps(config))
        assert words in one_line(lambda: dl.load(copy))


def test_damaged_weights_are_refused(copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "damaged or cut short" in one_line(lambda: dl.load(copy))
    weights.write_bytes(whole)
    tensors = load_file(weights)
    dropped = next(name for name in tensors if "layers.1.self_attn.q_proj" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, weights, {"format": "pt"})
    assert "weights are missing" in one_line(lambda: dl.load(copy))
    save_file({**tensors, dropped: tensors[dropped][:4].contiguous()}, weights, {"format": "pt"})
    assert str(copy) in one_line(lambda: dl.load(copy))


def test_a_folder_without_processor_is_refused(copy: Path) -> None:
    for file in ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copy / file).unlink()
    assert str(copy) in one_line(lambda: dl.load(copy))


def test_options_are_checked_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("something was loaded"))
    assert "Did you mean 'float32'?" in one_line(lambda: dl.load(folder, dtype="flot32"))
    assert "available: cpu" in one_line(lambda: dl.load(folder, device="gpu"))
    assert "has no revisions" in one_line(lambda: dl.load(folder, revision="main"))


def hub_error(name: str) -> type[Exception]:
    return type(name, (Exception,), {})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (hub_error("ConnectError"), "the hub cannot be reached"),
        (hub_error("RepositoryNotFoundError"), "neither a folder nor a model on the hub"),
        (hub_error("RevisionNotFoundError"), "no such revision"),
        (hub_error("GatedRepoError"), "consent"),
    ],
)
def test_what_the_hub_says_is_explained(monkeypatch: pytest.MonkeyPatch, error: type[Exception], words: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error("several\nlines")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    assert words in one_line(lambda: dl.load("nobody/no-such-model-of-dart-lab"))


def test_remote_code_is_never_run_unasked(copy: Path) -> None:
    trap = copy / "ran"
    (copy / "evil.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForImageTextToText": "evil.Model"}
    (copy / "config.json").write_text(json.dumps(config))
    assert dl.load(copy).family.name == "llava"
    assert not trap.exists()


# prompts and batches

def test_prompts_put_the_images_before_the_question() -> None:
    family = dl.load("tiny").family
    templated, plain = llava_processor(), llava_processor(chat_template=None)
    assert build_prompts(templated, family, ["what?"], [1]) == ["<bos> user : <image> what? assistant :"]
    assert build_prompts(plain, family, ["what?"], [1]) == [family.prompt.replace("{question}", "what?")]
    assert build_prompts(plain, family, ["a {question}?"], [2])[0].count("<image>") == 2


def test_batches_are_left_padded_and_hold_every_image_token(vlm: VLM) -> None:
    inputs = vlm.prepare([noise(), [noise(1), noise(2)], None], ["what is the shape?", "left?", "is the circle red?"])
    assert (inputs["input_ids"] == vlm.model.config.image_token_index).sum(dim=1).tolist() == [VISUAL, 2 * VISUAL, 0]
    assert bool(inputs["attention_mask"][:, -1].all())
    assert inputs["pixel_values"].shape[0] == 3
    assert (inputs["input_ids"] == vlm.processor.tokenizer.bos_token_id).sum(dim=1).tolist() == [1, 1, 1]


def test_a_batch_answers_as_its_questions_do_alone(vlm: VLM) -> None:
    images, questions = [noise(1), noise(2), noise(3)], ["what?", "where is the red circle?", "how many are there?"]
    together = vlm.ask(images, questions, max_new_tokens=6)
    assert together == vlm.ask(images, questions, max_new_tokens=6, batch_size=1)
    assert together == [vlm.ask([i], [q], max_new_tokens=6)[0] for i, q in zip(images, questions, strict=True)]
    assert len(set(together)) > 1


def test_a_padded_row_has_the_logits_it_has_alone(vlm: VLM) -> None:
    images, questions = [noise(1), noise(2)], ["what?", "where is the red circle there?"]
    with torch.no_grad():
        both = vlm.model(**vlm.prepare(images, questions)).logits[:, -1]
        alone = vlm.model(**vlm.prepare(images[:1], questions[:1])).logits[:, -1]
    torch.testing.assert_close(both[:1], alone, atol=1e-4, rtol=1e-4)


def test_paths_and_pillow_images_are_the_same(vlm: VLM, tmp_path: Path) -> None:
    noise().save(tmp_path / "picture.png")
    by_path, by_image = vlm.prepare([str(tmp_path / "picture.png")], ["what?"]), vlm.prepare([noise()], ["what?"])
    assert torch.equal(by_path["pixel_values"], by_image["pixel_values"])


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (3, 3), (2, 60)])
def test_the_smallest_pictures_keep_their_colour(vlm: VLM, size: tuple[int, int]) -> None:
    """A side of 1 or 3 pixels must not be taken for the colour channels."""
    small = vlm.prepare([Image.new("RGB", size, (200, 20, 90))], ["what?"])["pixel_values"]
    large = vlm.prepare([Image.new("RGB", (90, 90), (200, 20, 90))], ["what?"])["pixel_values"]
    torch.testing.assert_close(small, large)


def test_bad_batches_get_one_line(vlm: VLM, tmp_path: Path) -> None:
    picture = noise()
    assert "1 images but 2 questions" in one_line(lambda: vlm.prepare([picture], ["a?", "b?"]))
    assert "no questions" in one_line(lambda: vlm.prepare([], []))
    assert "question 1 is empty" in one_line(lambda: vlm.prepare([picture] * 2, ["a?", "  "]))
    assert "give a text" in one_line(lambda: vlm.prepare([picture], [3]))  # type: ignore[list-item]
    assert "image placeholder" in one_line(lambda: vlm.prepare([picture], ["is <image> red?"]))
    assert "give a list" in one_line(lambda: vlm.prepare([picture], "what?"))
    assert "give a list" in one_line(lambda: vlm.prepare(picture, ["what?"]))  # type: ignore[arg-type]
    assert "Pillow image" in one_line(lambda: vlm.prepare([np.zeros((3, 3))], ["what?"]))  # type: ignore[list-item]
    assert "no such picture" in one_line(lambda: vlm.prepare([tmp_path / "nothing.png"], ["what?"]))
    assert "200 times" in one_line(lambda: vlm.prepare([Image.new("RGB", (1, 300))], ["what?"]))


def test_right_padding_is_refused_in_generation(vlm: VLM) -> None:
    inputs = vlm.prepare([noise(), noise()], ["what?", "where is the circle?"])
    right = {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
    assert "padding_side = 'left'" in one_line(lambda: vlm.answers(right))


def test_padding_is_left_whatever_the_tokenizer_is_set_to(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm.processor.tokenizer, "padding_side", "right")
    inputs = vlm.prepare([noise(), noise()], ["what?", "where is the circle?"])
    assert bool(inputs["attention_mask"][:, -1].all())


def test_a_prompt_cut_inside_the_image_is_refused(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = type(vlm.processor).__call__

    def cutting(self: Any, **kwargs: Any) -> Any:
        out = whole(self, **kwargs)
        out["input_ids"], out["attention_mask"] = out["input_ids"][:, :20], out["attention_mask"][:, :20]
        return out

    monkeypatch.setattr(type(vlm.processor), "__call__", cutting)
    assert "cut" in one_line(lambda: vlm.prepare([noise()], ["what?"]))


def test_a_processor_that_takes_other_arguments_is_refused_in_a_line(
    vlm: VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow(self: Any, images: Any = None, text: Any = None) -> Any:
        raise AssertionError("never reached")

    monkeypatch.setattr(type(vlm.processor), "__call__", narrow)
    assert "unexpected keyword argument" in one_line(lambda: vlm.prepare([noise()], ["what?"]))


def test_a_prompt_beyond_the_models_length_is_warned_about(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm.model.config.text_config, "max_position_embeddings", VISUAL)
    with pytest.warns(DartLabWarning, match=f"was made for {VISUAL}"):
        vlm.prepare([noise()], ["what?"])


# provenance

def test_provenance_tells_the_weights_and_the_effective_backend(vlm: VLM, folder: Path) -> None:
    facts = vlm.provenance()
    assert facts["weights_sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert facts["prompt"] == "<bos> user : <image> {question} assistant :"
    assert facts["parameters"] == sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert json.loads(json.dumps(facts)) == facts
    assert str(folder.parent) not in json.dumps(facts)
    for backend in ("eager", "sdpa"):
        vlm.model.set_attn_implementation(backend)
        assert vlm.provenance()["attention"] == vlm.model.config.text_config._attn_implementation == backend


def test_sharded_weights_have_one_hash_that_follows_their_content(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    (copy / "model.safetensors").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, copy / f"model-{number}.safetensors", {"format": "pt"})
    loaded = VLM(model=None, processor=None, name="", family=None, folder=copy)  # type: ignore[arg-type]
    first = loaded.weights_sha256
    save_file({name: tensors[name] + 1 for name in names[::2]}, copy / "model-0.safetensors", {"format": "pt"})
    changed = VLM(model=None, processor=None, name="", family=None, folder=copy)  # type: ignore[arg-type]
    assert first is not None and first != changed.weights_sha256


def test_a_picture_is_named_by_its_place_in_all_that_was_given(vlm: VLM) -> None:
    good, strip = Image.new("RGB", (30, 30)), Image.new("RGB", (201, 1))
    for images, name in (([good, strip], "picture 1 is"), ([good, [good, strip]], "picture 1 of question 1 is")):
        with pytest.raises(DartLabError, match=name):
            vlm.ask(images, ["what ?"] * 2, max_new_tokens=1, batch_size=1)
        with pytest.raises(DartLabError, match=name):
            vlm.prepare(images, ["what ?"] * 2)
