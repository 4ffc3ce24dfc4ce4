"""Videos: budgets a frame, the frame of every token in the table, and what the draw of a random method depends on."""

from __future__ import annotations

import pytest
import torch

from dart_lab.pruners import FastV, Random, UniformGrid, Windowed
from dart_lab.vlm.insert import prune
from tests.vlm.families.zoo import VIDEOS, Zoo


@pytest.mark.parametrize("kind", VIDEOS, ids=str)
def test_windows_share_a_budget_over_frames(kind: Zoo) -> None:
    """One window a frame: each of three equal frames keeps a third, the best of its own."""
    model, inputs = kind.model("sdpa"), kind.batch("one")
    with torch.no_grad(), prune(model, FastV(keep=6)) as plain:
        model(**inputs)
    with torch.no_grad(), prune(model, Windowed(FastV(keep=6), windows=(1, 1))) as run:
        model(**inputs)
    table = run.table()
    assert table["frame"].nunique() == 3
    on_grid = table[table["row"] >= 0]
    kept = on_grid[on_grid["kept"]]
    assert kept.groupby("frame").size().tolist() == [2, 2, 2]
    best = on_grid.sort_values("score", ascending=False).groupby("frame")["token"].head(2)
    assert sorted(best) == sorted(kept["token"])
    assert plain.kept[0].tolist() != run.kept[0].tolist(), "the frames are not alike"


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
