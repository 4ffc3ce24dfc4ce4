"""The picture shows the numbers it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dart_lab.displays.heatmap import RATE
from dart_lab.displays.position_bias import draw_position_bias
from dart_lab.errors import DartLabError


def facts(methods: int = 2, budgets: int = 3, shifted: bool = True) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    conditions = []
    for m in range(methods):
        for k in range(budgets):
            value = rng.random(6) + 0.5
            condition = {
                "method": f"method-{m}", "keep": str(10 * (k + 1)), "got": 10.0 * (k + 1),
                "rate": rng.random((6, 5)).tolist(), "stage": "LLM_LAYER", "layer": 2,
                "rows": {
                    "value": value.tolist(), "low": (value - 0.1).tolist(), "high": (value + 0.1).tolist(),
                    "null_low": [0.9] * 6, "null_high": [1.1] * 6,
                },
            }
            if shifted:
                stat = {"value": 0.5, "low": 0.4, "high": 0.6}
                condition["content_shift"] = {what: {"canvas": stat, "content": stat} for what in ("maps", "pictures")}
            conditions.append(condition)
    what = {"model": "tiny", "data": "shapes", "layer": 2, "n": 40, "images": 30, "n_boot": 100}
    return {**what, "conditions": conditions}


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 2)])
def test_one_map_a_method_and_budget_all_on_one_scale(shape: tuple[int, int]) -> None:
    given = facts(*shape)
    figure = draw_position_bias(given)
    maps = [image for ax in figure.axes for image in ax.images]
    assert len(maps) == shape[0] * shape[1]
    assert all(image.norm is RATE for image in maps)
    assert [image.get_array().tolist() for image in maps] == [
        c["rate"] for m in range(shape[0]) for c in given["conditions"][m * shape[1] : (m + 1) * shape[1]]
    ]


def test_it_says_what_was_measured() -> None:
    figure = draw_position_bias(facts())
    words = " ".join(text.get_text() for text in figure.texts)
    for part in ("tiny", "shapes", "n = 40 questions on 30 pictures", "K = 2", "95 %"):
        assert part in words
    titles = {ax.get_title() for ax in figure.axes}
    assert {"10 kept", "20 kept", "30 kept"} <= titles and any("mean map" in title for title in titles)


def test_row_lines_and_intervals_are_the_given_ones_with_the_top_row_on_top() -> None:
    given = facts(1, 1)
    figure = draw_position_bias(given)
    ax = next(ax for ax in figure.axes if "by grid row" in ax.get_title())
    rows = given["conditions"][0]["rows"]
    assert ax.lines[0].get_xdata().tolist() == rows["value"]
    assert ax.yaxis_inverted()
    assert ax.get_xlim()[1] >= max(rows["high"]), "nothing is cut off"


def test_a_method_that_acts_elsewhere_than_the_title_says_is_marked() -> None:
    given = facts(3, 1)
    given["conditions"][1]["stage"], given["conditions"][2]["layer"] = "VISION_OUT", 8
    labels = [ax.get_ylabel() for ax in draw_position_bias(given).axes if ax.images]
    assert labels == ["method-0", "method-1\n(vision out)", "method-2\n(K = 8)"]


def test_without_flipped_pictures_their_panels_are_absent() -> None:
    assert not any("upside" in ax.get_title() for ax in draw_position_bias(facts(shifted=False)).axes)


def test_missing_facts_are_named() -> None:
    with pytest.raises(DartLabError, match="lack 'layer'"):
        draw_position_bias({k: v for k, v in facts().items() if k != "layer"})
    with pytest.raises(DartLabError, match="no conditions"):
        draw_position_bias({**facts(), "conditions": []})
