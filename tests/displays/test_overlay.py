"""The overlay: exactly the kept cells are bright, whatever picture and grid."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dart_lab.displays.overlay import overlay, overlay_pixels, overlay_png
from dart_lab.errors import DartLabError


def tokens(rows: int, columns: int, size: tuple[int, int], number: int = 0) -> SimpleNamespace:
    row, column = (part.ravel() for part in np.mgrid[:rows, :columns])
    box = np.stack([column, row, column + 1, row + 1], axis=1) * np.array([size[0] / columns, size[1] / rows] * 2)
    return SimpleNamespace(image=np.full(rows * columns, number), box=box)


def bright_cells(pixels: np.ndarray, original: np.ndarray, layout: SimpleNamespace, size: tuple[int, int]) -> set[int]:
    """Cells whose centre has the colour of the original picture (also enlarged)."""
    scale = np.array([pixels.shape[1] / size[0], pixels.shape[0] / size[1]])
    found = set()
    for i, (x0, y0, x1, y1) in enumerate(layout.box):
        x, y = (np.array([x0 + x1, y0 + y1]) / 2 * scale).astype(int)
        source = original[int((y0 + y1) / 2), int((x0 + x1) / 2)]
        if (pixels[y, x] == source).all():
            found.add(i)
    return found


@pytest.mark.parametrize("colour", ["white", "black", "red"])
def test_24_by_24_with_64_kept_has_64_bright_cells(colour: str) -> None:
    size = (336, 336)
    picture, layout = Image.new("RGB", size, colour), tokens(24, 24, size)
    kept = np.sort(np.random.default_rng(0).permutation(576)[:64])
    found = bright_cells(overlay_pixels(picture, layout, kept), np.asarray(picture), layout, size)
    assert found == set(kept.tolist()) and len(found) == 64


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_grid_and_picture(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    size = (data.draw(st.integers(4 * columns, 300)), data.draw(st.integers(4 * rows, 300)))
    kept = data.draw(st.sets(st.integers(0, rows * columns - 1)))
    picture, layout = Image.new("RGB", size, "white"), tokens(rows, columns, size)
    pixels = overlay_pixels(picture, layout, sorted(kept))
    assert bright_cells(pixels, np.asarray(picture), layout, size) == kept


def test_kept_cells_show_the_picture_itself_and_a_line_divides_them_from_pruned_ones() -> None:
    size = (480, 480)  # more than half the display size: shown pixel by pixel
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (480, 480, 3), dtype=np.uint8))
    pixels, original = overlay_pixels(picture, tokens(4, 4, size), [5]), np.asarray(picture)
    assert (pixels[120:240, 120:240] == original[120:240, 120:240]).all()
    edge = {tuple(colour) for colour in pixels[119, 120:240].tolist()}
    assert len(edge) == 1, "a line in one colour"
    assert (pixels[0, 0] != original[0, 0]).any()


def test_a_grey_picture_shows_which_cells_are_kept() -> None:
    picture = Image.new("RGB", (48, 48), (118, 118, 118))
    pixels = overlay_pixels(picture, tokens(2, 2, (48, 48)), [0])
    assert (pixels == [230, 159, 0]).all(axis=2).any()


def test_tokens_of_other_pictures_and_without_a_place_are_left_out() -> None:
    size = (100, 100)
    first, second = tokens(2, 2, size), tokens(2, 2, size, number=1)
    both = SimpleNamespace(
        image=np.concatenate([first.image, second.image, [1]]),
        box=np.concatenate([first.box, second.box, [[np.nan] * 4]]),
    )
    picture = Image.new("RGB", size, "white")
    alone = overlay_pixels(picture, second, [2], number=1)
    assert (overlay_pixels(picture, both, [0, 6, 8], number=1) == alone).all()


def test_a_large_picture_is_shrunk() -> None:
    size = (2500, 1024)
    pixels = overlay_pixels(Image.new("RGB", size, "white"), tokens(2, 2, size), [0, 3])
    assert pixels.shape == (295, 720, 3)
    assert (pixels[60, 150] == 255).all() and (pixels[200, 500] == 255).all() and (pixels[60, 500] < 200).all()


def test_png_holds_the_pixels_and_is_the_same_each_time() -> None:
    picture, layout = Image.new("RGB", (96, 48), "teal"), tokens(2, 4, (96, 48))
    png = overlay_png(picture, layout, [1, 6])
    assert png == overlay_png(picture, layout, [1, 6])
    assert (np.asarray(Image.open(io.BytesIO(png))) == overlay_pixels(picture, layout, [1, 6])).all()


def test_several_overlays_say_how_many_are_kept() -> None:
    picture, layout = Image.new("RGB", (96, 96)), tokens(3, 3, (96, 96))
    figure = overlay([picture] * 2, [layout] * 2, [[1], [2, 3]])
    assert [ax.get_title() for ax in figure.axes] == ["1 of 9 kept", "2 of 9 kept"]
    for ax, kept in zip(figure.axes, ([1], [2, 3]), strict=True):
        assert (ax.images[0].get_array() == overlay_pixels(picture, layout, kept)).all()


@pytest.mark.parametrize("kept", [[9], [-1]])
def test_indices_outside_the_sample_are_refused(kept: list[int]) -> None:
    with pytest.raises(DartLabError, match=rf"index {kept[0]} is outside the sample, which has 9"):
        overlay_pixels(Image.new("RGB", (9, 9)), tokens(3, 3, (9, 9)), kept)


def test_wrong_picture_number_and_lengths_are_refused() -> None:
    picture, layout = Image.new("RGB", (9, 9)), tokens(3, 3, (9, 9))
    with pytest.raises(DartLabError, match="picture 4 has no visual tokens"):
        overlay_pixels(picture, layout, [], number=4)
    with pytest.raises(DartLabError, match="1 images, 2 samples"):
        overlay([picture], [layout] * 2, [[1]])
    with pytest.raises(DartLabError, match="0 images"):
        overlay([], [], [])
