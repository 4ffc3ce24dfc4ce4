"""Videos: budgets a frame, the frame of every token in the table, and what the draw of a random method depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import transformers
from torch import Tensor

from dart_lab.pruners import Random, ScorePruner, Signals, UniformGrid, Windowed
from dart_lab.vlm.insert import prune
from tests.vlm.families.zoo import VIDEOS, Zoo


@dataclass(frozen=True, kw_only=True)
class Last(ScorePruner):
    """Keeps the last tokens: of a video, those of its last frame."""

    name: ClassVar[str] = "last"
    needs: ClassVar[frozenset[str]] = frozenset()

    def score(self, signals: Signals) -> Tensor:
        return torch.arange(signals.valid.shape[1]).expand(signals.valid.shape).float()


@pytest.mark.parametrize("kind", VIDEOS, ids=str)
def test_windows_share_a_budget_over_frames(kind: Zoo) -> None:
    """One window a frame: each of three equal frames keeps a third, the last of its own."""
    model, inputs = kind.model("sdpa"), kind.batch("one")
    with torch.no_grad(), prune(model, Last(keep=3)) as plain:
        model(**inputs)
    with torch.no_grad(), prune(model, Windowed(Last(keep=6), windows=(1, 1))) as run:
        model(**inputs)
    assert set(plain.table().query("kept")["frame"]) == {2}
    on_grid = run.table().query("row >= 0")
    kept = on_grid[on_grid["kept"]]
    assert kept["frame"].tolist() == [0, 0, 1, 1, 2, 2]
    assert kept["token"].tolist() == on_grid.groupby("frame")["token"].tail(2).tolist()


@pytest.mark.parametrize("kind", VIDEOS, ids=str)
def test_an_even_grid_takes_tokens_of_every_frame(kind: Zoo) -> None:
    model, inputs = kind.model("sdpa"), kind.batch("one")
    with torch.no_grad(), prune(model, UniformGrid(keep=3)) as run:
        model(**inputs)
    table = run.table()
    assert table[table["kept"]]["frame"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", VIDEOS, ids=str)
def test_a_draw_depends_on_every_picture_and_video(kind: Zoo) -> None:
    model, inputs = kind.model("sdpa"), kind.batch("padded")
    pixels = [name for name in inputs if name.startswith("pixel_values")]
    assert len(pixels) == 2

    def kept(**changed: torch.Tensor) -> list[list[int]]:
        with torch.no_grad(), prune(model, Random(keep=5)) as run:
            model(**{**inputs, **changed})
        return [tokens.tolist() for tokens in run.kept]

    plain = kept()
    for name in pixels:
        other = inputs[name].clone()
        other[-1] += 1  # of the last prompt
        assert [a == b for a, b in zip(kept(**{name: other}), plain, strict=True)] == [True, False]


@pytest.mark.parametrize("kind", VIDEOS, ids=str)
def test_beams_draw_as_a_single_pass_does(kind: Zoo) -> None:
    """Beams repeat the video and the picture; the sample is the same one."""
    if str(kind) == "qwen3_vl video" and transformers.__version__.startswith("4."):
        pytest.skip("this release of transformers cannot repeat a timed video for beams")
    model, inputs = kind.model("sdpa"), kind.row("padded", 0)
    kept = []
    for beams in (1, 2):
        with prune(model, Random(keep=5)) as run:
            model.generate(**inputs, max_new_tokens=2, num_beams=beams, do_sample=False, suppress_tokens=[*kind.visual])
        kept.append([tokens.tolist() for tokens in run.kept])
        assert [last > 0 for last in run.table().groupby("image")["frame"].max()] == [True, False]
    assert kept[0] == kept[1]
