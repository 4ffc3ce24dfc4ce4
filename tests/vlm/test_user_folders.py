"""Checkpoints as users have them: shards, copies, a hub cache without network, adapters; and folders that are none."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

import dart_lab as dl
from dart_lab.errors import DartLabError
from dart_lab.vlm import adapters, load, quantization
from tests.vlm.checkpoints import save_checkpoint

PICTURE = Image.new("RGB", (40, 30), (200, 20, 90))
LAYER = "layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llava", tmp_path_factory.mktemp("hub") / "llava")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "my_finetune-v2"))


def one_line(action: Callable[[], Any]) -> str:
    with pytest.raises(DartLabError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def logits(vlm: dl.VLM) -> torch.Tensor:
    with torch.no_grad():
        return vlm.model(**vlm.prepare([PICTURE], ["what?"])).logits


def weight(vlm: dl.VLM) -> torch.Tensor:
    named = vlm.model.state_dict().items()
    return next(value for name, value in named if "language_model" in name and f"{LAYER}.weight" in name)


def scale_weights(folder: Path, factor: float) -> None:
    file = folder / "model.safetensors"
    save_file({name: value * factor for name, value in load_file(file).items()}, file, {"format": "pt"})


# whole models

def test_shards_are_the_same_model_and_a_lost_one_is_named(folder: Path, tmp_path: Path) -> None:
    save_checkpoint("llava", tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1 and not (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(dl.load(tmp_path, device="cpu")), logits(dl.load(folder, device="cpu")))
    shards[1].unlink()
    assert f"lacks 1 of {len(shards)} weight files ({shards[1].name}" in one_line(lambda: dl.load(tmp_path))


def test_a_fine_tuned_copy_under_any_name_is_its_own_model(folder: Path, copy: Path) -> None:
    scale_weights(copy, 0.5)
    tuned, first = dl.load(copy, device="cpu"), dl.load(folder, device="cpu")
    torch.testing.assert_close(weight(tuned), weight(first) / 2)
    assert tuned.family is first.family
    assert tuned.provenance()["model"] == "my_finetune-v2"
    assert tuned.weights_sha256 != first.weights_sha256


def test_a_hub_id_comes_from_the_cache_at_the_revision_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--someone--my-llava"
    commits = {"main": "a" * 40, "v2": "b" * 40}
    for number, (name, commit) in enumerate(commits.items(), start=1):
        scale_weights(Path(shutil.copytree(folder, repository / "snapshots" / commit)), number)
        reference = repository / "refs" / name
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(commit)

    def unreachable(*_: object, **__: object) -> None:
        raise type("ConnectError", (Exception,), {})

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(transformers.utils.hub, "TRANSFORMERS_CACHE", str(tmp_path), raising=False)  # before 5
    main, second = (dl.load("someone/my-llava", revision=name, device="cpu") for name in (None, "v2"))
    torch.testing.assert_close(weight(second), 2 * weight(main))
    assert second.folder == repository / "snapshots" / commits["v2"]
    assert second.provenance()["revision"] == commits["v2"]
    assert "not on this disk" in one_line(lambda: dl.load("someone/my-llava", revision="v3"))
    assert "not on this disk" in one_line(lambda: dl.load("someone/another"))


# adapters

def lora(folder: Path, base: Path, *, rank: int = 2, name: str = LAYER, width: int = 32, **settings: Any) -> Path:
    """A LoRA adapter as peft writes one; returns its folder."""
    folder.mkdir()
    config = {
        "peft_type": "LORA", "base_model_name_or_path": str(base), "r": rank, "lora_alpha": 6,
        "target_modules": ".*language_model.*" + name.replace(".", r"\."), **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    path = f"base_model.model.model.language_model.{name}"
    parts = {"lora_A": (rank, width), "lora_B": (width, rank)}
    tensors = {f"{path}.{part}.weight": torch.randn(size, generator=draw) for part, size in parts.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def test_an_adapter_without_peft_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda _: None)
    line = one_line(lambda: dl.load(lora(tmp_path / "adapter", folder)))
    assert "is a LoRA adapter of" in line and "pip install 'dart-lab[lora]'" in line
    assert "only LoRA" in one_line(lambda: dl.load(lora(tmp_path / "other", folder, peft_type="IA3")))
    assert "names no model" in one_line(
        lambda: dl.load(lora(tmp_path / "orphan", folder, base_model_name_or_path=None))
    )


def test_an_adapter_is_added_to_the_weights_of_its_model(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    adapter = lora(tmp_path / "adapter", folder)
    adapted, base = dl.load(adapter, device="cpu"), dl.load(folder, device="cpu")
    a, b = (value for _, value in sorted(load_file(adapter / "adapter_model.safetensors").items()))
    torch.testing.assert_close(weight(adapted), weight(base) + 6 / 2 * b @ a)
    changed = [name for name, value in base.model.state_dict().items()
               if not torch.equal(adapted.model.state_dict()[name], value)]  # fmt: skip
    assert len(changed) == 1
    assert type(adapted.model) is type(base.model) and not adapted.model.training
    assert adapted.weights_sha256 not in (None, base.weights_sha256)
    assert adapted.ask([PICTURE], ["what?"], max_new_tokens=2)


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    foreign = lora(tmp_path / "foreign", folder)
    weights = foreign / "adapter_model.safetensors"
    renamed = {name.replace("layers.1", "layers.2"): value for name, value in load_file(weights).items()}
    save_file(renamed, weights, {"format": "pt"})
    assert "do not fit the model" in one_line(lambda: dl.load(foreign))
    assert "no such folder" in one_line(lambda: dl.load(lora(tmp_path / "lost", tmp_path / "gone")))


# options whose packages may be missing

def test_quantization_without_its_packages_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda _: None)
    assert "pip install 'dart-lab[quantization]'" in one_line(lambda: dl.load(folder, quantization="4bit"))
    assert "Did you mean '8bit'?" in one_line(lambda: dl.load(folder, quantization="8bits"))


def test_quantization_reaches_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda _: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.48")  # asked for by transformers before 5
    given: dict[str, Any] = {}

    class Stopped(ValueError): ...

    def stop(*_: Any, **options: Any) -> None:
        given.update(options)
        raise Stopped("here")

    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", stop)
    with pytest.raises(DartLabError, match="here"):
        dl.load(folder, quantization="4bit", dtype="bfloat16", device="cpu")
    assert given["quantization_config"].load_in_4bit and given["dtype"] is torch.bfloat16
    assert given["quantization_config"].bnb_4bit_compute_dtype is torch.bfloat16
    assert given["device_map"] == {"": torch.device("cpu")}


def test_device_map_needs_accelerate_and_no_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "find_spec", lambda _: None)
    assert "pip install accelerate" in one_line(lambda: dl.load(folder, device_map="auto"))
    assert "are both given" in one_line(lambda: dl.load(folder, device_map="auto", device="cpu"))


def test_device_map_spreads_the_model(folder: Path) -> None:
    pytest.importorskip("accelerate")
    spread = dl.load(folder, device_map={"": "cpu"})
    assert torch.equal(logits(spread), logits(dl.load(folder, device="cpu")))


# folders that are none

def test_foreign_folders_get_one_line(copy: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is empty" in one_line(lambda: dl.load(empty))
    config = json.loads((copy / "config.json").read_text())
    text_only = config["text_config"]
    for content, words in (
        ({**text_only, "model_type": "llama"}, "model_type is 'llama', which is not supported"),
        ({**text_only, "model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"]}, "take the converted"),
        ([], "model_type is nothing"),
    ):
        (copy / "config.json").write_text(json.dumps(content))
        assert words in one_line(lambda: dl.load(copy))


def test_a_damaged_weights_file_is_told_from_other_faults(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "damaged or cut short" in one_line(lambda: dl.load(copy))
