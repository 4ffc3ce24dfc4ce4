"""Down-sampled pictures hold no more than they should."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dart_lab.errors import DartLabError
from dart_lab.tasks import load_task
from dart_lab.tasks.coarse import coarse, coarse_picture, shrunk


def test_detail_finer_than_the_share_is_gone_and_coarse_detail_stays() -> None:
    """A checkerboard of single pixels turns grey at a quarter; one of 24-pixel fields keeps its fields."""
    cells = np.indices((96, 96)).sum(axis=0) % 2 * 255
    fine = Image.fromarray(cells.astype(np.uint8)).convert("RGB")
    wide = Image.fromarray(
        np.kron(np.indices((4, 4)).sum(axis=0) % 2 * 255, np.ones((24, 24))).astype(np.uint8)
    ).convert("RGB")
    assert np.asarray(coarse_picture(fine, share=0.25))[8:-8, 8:-8].std() < 8
    after = np.asarray(coarse_picture(wide, share=0.25)).astype(float)
    assert abs(after - np.asarray(wide))[12::24, 12::24].max() < 8


def test_the_whole_picture_is_left_alone_and_one_pixel_is_the_least() -> None:
    picture = load_task("shapes", n=1, seed=0)[0].image
    assert np.array_equal(np.asarray(coarse_picture(picture, share=1.0)), np.asarray(picture))
    assert shrunk(Image.new("RGB", (20, 1)), share=0.01).size == (2, 1)


def test_a_coarse_task_keeps_everything_but_the_pictures() -> None:
    task = load_task("shapes", n=3, seed=0)
    same, small = coarse(task, share=0.25), coarse(task, share=0.25, blow_up=False)
    assert [s.question for s in same] == [s.question for s in task] and len(small) == 3
    assert same[1].boxes == task[1].boxes and small[1].boxes == ()
    assert small[0].image.size == (168, 168) and same.details["coarse"] == {"share": 0.25, "blow_up": True}
    with pytest.raises(DartLabError, match="at most 1"):
        coarse(task, share=1.5)
