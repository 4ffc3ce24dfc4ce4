"""Kept maps: a planted bias is found and stays in place, planted content moves, uniform keeping is called chance."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dart_lab.analysis.kept_maps as module
from dart_lab.analysis.kept_maps import KeptMaps, content_shift, describe, kept_maps, regrid, uniform_null
from dart_lab.analysis.position_bias import measure
from dart_lab.errors import DartLabError
from tests.analysis.planted import keep_by, planted, trace

ROWS, COLUMNS = 12, 10
LOWER_ROWS_LIKED = np.linspace(0.3, 1.7, ROWS)[:, None] * np.ones((ROWS, COLUMNS))
NO_PLACE = np.ones((ROWS, COLUMNS))


def object_at_the_top(number: int, rng: np.random.Generator) -> np.ndarray:
    """Objects that all lie in the upper half of their picture."""
    weights = np.ones((ROWS, COLUMNS))
    row, column = rng.integers(0, 4), rng.integers(0, COLUMNS - 3)
    weights[row : row + 3, column : column + 3] = 30
    return weights


def uniform(n: int, count: int, rng: np.random.Generator) -> KeptMaps:
    maps = np.stack([keep_by(NO_PLACE, count, rng) for _ in range(n)]).astype(float)
    ids = tuple(map(str, range(n)))
    return KeptMaps(maps, ((ROWS, COLUMNS),) * n, (count,) * n, ids, asked=count, got=count)


def within_chance(stat: dict[str, list[float]]) -> list[bool]:
    return [a <= x <= b for x, a, b in zip(stat["value"], stat["null_low"], stat["null_high"], strict=True)]


def only(table: pd.DataFrame, **options: int) -> dict:
    return measure(table, n_boot=200, n_null=200, **options)["conditions"][0]


def test_doctests_of_the_module() -> None:
    assert doctest.testmod(module).failed == 0


def test_a_planted_liking_for_low_rows_is_found_and_stays_in_place() -> None:
    found = only(planted(place=LOWER_ROWS_LIKED, n=150, count=30, seed=0))
    index, bottom = found["mean_raster_index"], found["bottom_third"]
    assert index["low"] > index["null_high"] and bottom["low"] > bottom["null_high"]
    assert found["kl"]["value"] > found["kl"]["null_high"] and found["gini"]["value"] > found["gini"]["null_high"]
    assert np.corrcoef(found["rows"]["value"], np.arange(ROWS))[0, 1] > 0.97, "the marginal rises with the row"
    assert np.mean(within_chance(found["columns"])) >= 0.8, "no liking for columns was planted"
    shift = found["content_shift"]["maps"]
    assert shift["canvas"]["low"] > 0.6 and shift["content"]["high"] < -0.3 and shift["index"]["low"] > 0


def test_planted_content_moves_with_the_flipped_picture() -> None:
    found = only(planted(place=NO_PLACE, content=object_at_the_top, n=150, count=30, seed=0))
    shift = found["content_shift"]
    assert shift["maps"]["content"]["low"] > 0.6 and shift["maps"]["index"]["high"] < 0
    assert shift["pictures"]["content"]["low"] > 0.05 and abs(shift["pictures"]["canvas"]["value"]) < 0.15
    assert found["mean_raster_index"]["high"] < found["mean_raster_index"]["null_low"], "looks like a bias"


def test_place_and_content_together_are_told_apart() -> None:
    def anywhere(number: int, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.repeat([1.0, 30.0], ROWS * COLUMNS // 2)).reshape(ROWS, COLUMNS)

    both = only(planted(place=LOWER_ROWS_LIKED, content=anywhere, n=150, count=30, seed=1))["content_shift"]
    place = only(planted(place=LOWER_ROWS_LIKED, n=150, count=30, seed=1))["content_shift"]
    assert both["maps"]["canvas"]["low"] > 0.5, "content spread evenly leaves no trace in the mean map"
    assert both["pictures"]["content"]["low"] > place["pictures"]["content"]["high"], "but each picture shows it"


def test_a_fixed_grid_is_all_place() -> None:
    mask = np.zeros((ROWS, COLUMNS), dtype=bool)
    mask[1::4, ::3] = True
    masks = [mask] * 20
    found = only(pd.concat([trace(masks), trace(masks, flip="vertical")], ignore_index=True))
    for what in ("maps", "pictures"):
        assert found["content_shift"][what]["canvas"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["content_shift"]["maps"]["content"]["value"] < 0.5


def test_uniform_keeping_lies_in_its_own_band_about_95_times_in_100() -> None:
    runs, rng = 120, np.random.default_rng(5)
    null = uniform_null(uniform(30, 20, rng), draws=400, seed=99)
    inside = dict.fromkeys(("mean_raster_index", "bottom_third", "kl", "gini"), 0)
    rows = cells = 0.0
    for _ in range(runs):
        found = describe(uniform(30, 20, rng), null, n_boot=1, seed=0)
        for name in inside:
            inside[name] += found[name]["null_low"] <= found[name]["value"] <= found[name]["null_high"]
        rows += float(np.mean(within_chance(found["rows"])))
        cells += 1 - found["cells_outside_chance"]
    for name, hits in inside.items():
        assert 0.88 <= hits / runs <= 0.995, name
    assert 0.93 <= rows / runs <= 0.98 and 0.93 <= cells / runs <= 0.99


def test_flipped_uniform_keeping_agrees_with_nothing() -> None:
    hits = dict.fromkeys(itertools.product(("maps", "pictures"), ("canvas", "content")), 0)
    runs, rng = 60, np.random.default_rng(6)
    for _ in range(runs):
        shift = content_shift(uniform(40, 30, rng), uniform(40, 30, rng), n_boot=200, seed=0)
        for what, name in hits:
            hits[what, name] += shift[what][name]["low"] <= 0 <= shift[what][name]["high"]
    assert all(count / runs >= 0.85 for count in hits.values()), hits


def test_kl_and_gini_of_planted_maps_are_exact() -> None:
    """Two samples keep the left half, so the map is 1 there and 0 elsewhere: KL = log 2, Gini = ½."""
    mask = np.zeros((4, 6), dtype=bool)
    mask[:, :3] = True
    found = only(trace([mask, mask]))
    assert found["kl"]["value"] == pytest.approx(math.log(2), rel=1e-5)
    assert found["gini"]["value"] == pytest.approx(0.5)
    assert found["retention_ratio"] == 0.5 and found["rate"] == [[2.0, 2.0, 2.0, 0.0, 0.0, 0.0]] * 4
    assert found["rows"]["value"] == [1.0] * 4 and found["columns"]["value"] == [2.0] * 3 + [0.0] * 3
    assert found["bottom_third"]["value"] == pytest.approx(1 / 3, rel=1e-5)


def test_the_raster_index_is_a_mean_over_kept_tokens_by_hand() -> None:
    masks = [np.zeros((2, 3), dtype=bool) for _ in range(2)]
    masks[0][0, 0] = masks[0][1, 2] = True  # tokens 0 and 5
    masks[1][1, 1] = masks[1][1, 2] = True  # tokens 4 and 5
    expected = np.mean([(0.5 + 5.5) / 2 / 6, (4.5 + 5.5) / 2 / 6])
    found = only(trace(masks))
    assert found["mean_raster_index"]["value"] == pytest.approx(expected, rel=1e-5)
    # the bottom third of the picture is two thirds of the lower row
    assert found["bottom_third"]["value"] == pytest.approx((1 / 2 + 1) / 2 * 2 / 3, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_regridding_shares_cells_out_by_area(data: st.DataObject) -> None:
    """Against brute force: enlarge every cell to a block, then average the blocks of each bin."""
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    to = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    mask = np.random.default_rng(data.draw(st.integers(0, 99))).random((rows, columns))
    height, width = math.lcm(rows, to[0]), math.lcm(columns, to[1])
    fine = mask.repeat(height // rows, axis=0).repeat(width // columns, axis=1)
    expected = fine.reshape(to[0], height // to[0], to[1], width // to[1]).mean(axis=(1, 3))
    got = regrid(mask, *to)
    assert np.allclose(got, expected) and got.mean() == pytest.approx(mask.mean())


def test_grids_of_several_shapes_are_brought_together() -> None:
    rng = np.random.default_rng(0)
    masks = [keep_by(np.ones(shape), 6, rng) for shape in [(4, 6), (6, 4), (5, 5), (4, 4)] * 10]
    maps = kept_maps(trace(masks))
    assert maps.maps.shape == (40, 4, 4) and maps.counts == (6,) * 40
    assert maps.maps.mean() == pytest.approx(maps.retention_ratio)
    assert maps.retention_ratio == pytest.approx(np.mean([6 / 24, 6 / 24, 6 / 25, 6 / 16]))
    found = describe(maps, uniform_null(maps, draws=100, seed=0), n_boot=50, seed=0)
    assert found["mean_raster_index"]["null_low"] < 0.5 < found["mean_raster_index"]["null_high"]


def test_only_the_first_pictures_first_crop_counts() -> None:
    rng = np.random.default_rng(0)
    masks = [keep_by(NO_PLACE, 20, rng) for _ in range(4)]
    table = trace(masks)
    more = table.assign(crop=1, kept=True)
    second = table.assign(image=1, kept=False)
    newline = table.groupby("sample").head(3).assign(row=-1, column=-1, kept=True)
    both = pd.concat([table, more, second, newline], ignore_index=True).assign(got=999)
    assert (kept_maps(both).maps == kept_maps(table).maps).all()


def test_the_order_of_rows_does_not_matter() -> None:
    table = trace([keep_by(LOWER_ROWS_LIKED, 20, np.random.default_rng(i)) for i in range(3)])
    assert (kept_maps(table.sample(frac=1, random_state=0)).maps == kept_maps(table).maps).all()


def test_a_map_whose_mean_is_not_the_retention_ratio_is_refused() -> None:
    table = trace([keep_by(NO_PLACE, 20, np.random.default_rng(i)) for i in range(3)])
    with pytest.raises(DartLabError, match="the retention ratio"):
        kept_maps(table.assign(got=21))


def test_damaged_and_empty_traces_are_refused() -> None:
    table = trace([keep_by(NO_PLACE, 20, np.random.default_rng(i)) for i in range(3)])
    with pytest.raises(DartLabError, match="each cell holds one"):
        kept_maps(table.drop(index=5))
    with pytest.raises(DartLabError, match="each cell holds one"):
        kept_maps(pd.concat([table, table.head(1)]))
    with pytest.raises(DartLabError, match="at least 2"):
        kept_maps(table[table["sample"] == 0])
    with pytest.raises(DartLabError, match="no rows"):
        measure(table.head(0))
    flipped = trace([keep_by(NO_PLACE, 20, np.random.default_rng(i)) for i in range(2)])
    with pytest.raises(DartLabError, match="different samples"):
        content_shift(kept_maps(table), kept_maps(flipped), n_boot=10, seed=0)
