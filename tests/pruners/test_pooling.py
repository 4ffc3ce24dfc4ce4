"""Pooling and resizing of the feature grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import FeatureDownsample, Pooling, Signals, UniformGrid
from dart_lab.pruners.feature_downsample import sides
from dart_lab.testing import check_pruner
from tests.pruners.crops import places


def signals(rows: int, columns: int, count: int = 1) -> Signals:
    n = rows * columns
    return Signals.of(visual=torch.arange(n).expand(count, -1), grid=places(rows, columns).expand(count, -1, -1))


@pytest.mark.parametrize("method", [
    Pooling(keep=4), FeatureDownsample(keep=4), FeatureDownsample(keep=4, filter="bilinear"),
    FeatureDownsample(keep=4, filter="nearest-exact"),
], ids=lambda method: method.name)
def test_contract(method) -> None:
    check_pruner(method)


@given(rows=st.integers(1, 7), columns=st.integers(1, 7), data=st.data())
def test_cells_part_the_grid_and_uniform_grid_keeps_their_centres(rows, columns, data) -> None:
    keep = data.draw(st.integers(1, rows * columns))
    got = Pooling(keep=keep)(signals(rows, columns))
    assert bool((got.members().sum(dim=1) == 1).all())
    assert bool(got.members()[0].gather(1, got.sequence[0][:, None]).all())  # a cell's centre is in it
    assert torch.equal(got.keep, UniformGrid(keep=keep)(signals(rows, columns)).keep)
    assert float(got.sizes.sum()) == rows * columns


@pytest.mark.parametrize(("side", "keep", "window"), [(24, 144, 2), (24, 64, 3), (6, 4, 3), (4, 16, 1)])
def test_square_cells_are_ordinary_average_pooling(side, keep, window) -> None:
    states = torch.randn(1, side * side, 5, generator=torch.Generator().manual_seed(0))
    picture = states.mT.reshape(1, 5, side, side)
    want = torch.nn.functional.avg_pool2d(picture, window).flatten(2).mT
    torch.testing.assert_close(Pooling(keep=keep)(signals(side, side)).apply(states), want)
    torch.testing.assert_close(FeatureDownsample(keep=keep)(signals(side, side)).apply(states), want)


def test_tokens_without_a_grid_are_pooled_as_a_line() -> None:
    plain = Signals.of(visual=torch.arange(6)[None])
    got = Pooling(keep=3)(plain).apply(torch.arange(6.0).reshape(1, 6, 1))
    assert got[0, :, 0].tolist() == [0.5, 2.5, 4.5]
    with pytest.raises(DartLabError, match="unknown; use pooling"):
        FeatureDownsample(keep=3)(plain)


@pytest.mark.parametrize("mode", ["area", "bilinear", "nearest-exact"])
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), data=st.data())
def test_resizing_equals_interpolate(mode, rows, columns, data) -> None:
    height, width = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    height, width = sides(rows, columns, height * width)
    assume(mode != "bilinear" or width > 1)  # torch's own filter is wrong for one column: its rows come out alike
    states = torch.randn(1, rows * columns, 3, generator=torch.Generator().manual_seed(rows))
    smooth = {"antialias": True} if mode == "bilinear" else {}
    picture = states.mT.reshape(1, 3, rows, columns)
    want = torch.nn.functional.interpolate(picture, size=(height, width), mode=mode, **smooth).flatten(2).mT
    got = FeatureDownsample(keep=height * width, filter=mode)(signals(rows, columns))
    torch.testing.assert_close(got.apply(states), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.weights().sum(dim=2), torch.ones(1, height * width), atol=1e-5, rtol=0)


def test_one_column_is_resized_as_one_row() -> None:
    states = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0))
    pruner = FeatureDownsample(keep=4, filter="bilinear")
    torch.testing.assert_close(pruner(signals(6, 1)).apply(states), pruner(signals(1, 6)).apply(states))


def test_sides_keep_the_proportions_or_name_the_nearest_numbers() -> None:
    assert sides(24, 24, 144) == (12, 12)
    assert sides(24, 24, 128) == (8, 16)
    assert sides(12, 24, 72) == (6, 12)
    with pytest.raises(DartLabError, match="give 126 or 128"):
        sides(24, 24, 127)
    with pytest.raises(DartLabError, match="'bilinear'"):
        FeatureDownsample(keep=4, filter="bilinaer")
