"""Every kind of picture file becomes the right upright RGB, and every bad one gives one clear line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dart_lab.errors import DartLabError
from dart_lab.vlm.images import MAX_ASPECT, MAX_PIXELS, check_aspect, open_image, to_rgb

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
EXIF_ORIENTATION = 0x0112


def corners() -> Image.Image:
    """64 × 32 with one colour a quarter: red green / blue white."""
    picture = Image.new("RGB", (64, 32), RED)
    picture.paste(GREEN, (32, 0, 64, 16))
    picture.paste(BLUE, (0, 16, 32, 32))
    picture.paste(WHITE, (32, 16, 64, 32))
    return picture


def quarter_colours(picture: Image.Image) -> list[tuple[int, ...]]:
    width, height = picture.size
    return [picture.getpixel((width * x // 4, height * y // 4)) for y in (1, 3) for x in (1, 3)]


def near(colours: list[tuple[int, ...]], expected: list[tuple[int, ...]], slack: int = 12) -> bool:
    return bool((np.abs(np.array(colours) - np.array(expected)) <= slack).all())


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "tiff", "bmp"])
def test_formats_keep_their_colours(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"picture.{suffix}"
    corners().save(file)
    picture = open_image(file)
    assert (picture.mode, picture.size) == ("RGB", (64, 32))
    assert near(quarter_colours(picture), [RED, GREEN, BLUE, WHITE])


def test_exif_rotation_is_applied_for_every_orientation(tmp_path: Path) -> None:
    upright = corners()
    inverse = {  # how a camera stores the upright picture under each orientation tag
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270,
    }
    for orientation, operation in inverse.items():
        stored = upright if operation is None else upright.transpose(operation)
        exif = Image.Exif()
        exif[EXIF_ORIENTATION] = orientation
        for suffix in ("jpg", "png"):
            file = tmp_path / f"{orientation}.{suffix}"
            stored.save(file, exif=exif)
            picture = open_image(file)
            assert picture.size == (64, 32), (orientation, suffix)
            assert near(quarter_colours(picture), [RED, GREEN, BLUE, WHITE]), (orientation, suffix)


def test_exif_rotation_survives_shrinking(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    corners().resize((640, 320)).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "big.jpg", exif=exif)
    picture = open_image(tmp_path / "big.jpg", max_side=100)
    assert picture.width == 2 * picture.height <= 100
    assert near(quarter_colours(picture), [RED, GREEN, BLUE, WHITE])


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    half = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    half.putpixel((1, 0), (255, 0, 0, 0))
    half.save(tmp_path / "rgba.png")
    half.convert("P").save(tmp_path / "palette.png", transparency=0)
    grey = Image.new("LA", (2, 1), (0, 255))
    grey.putpixel((1, 0), (0, 0))
    grey.save(tmp_path / "la.png")
    assert list(np.array(open_image(tmp_path / "rgba.png"))[0].tolist()) == [list(RED), list(WHITE)]
    assert list(np.array(open_image(tmp_path / "la.png"))[0].tolist()) == [[0, 0, 0], list(WHITE)]
    keyed = Image.new("RGB", (2, 1), RED)
    keyed.putpixel((1, 0), BLUE)
    keyed.save(tmp_path / "keyed.png", transparency=BLUE)
    assert np.array(open_image(tmp_path / "keyed.png"))[0].tolist() == [list(RED), list(WHITE)]


def test_half_transparent_is_half_white() -> None:
    assert to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 128))).getpixel((0, 0)) == (127, 127, 127)


def test_palette_grey_bilevel_and_cmyk(tmp_path: Path) -> None:
    corners().convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "palette.png")
    assert near(quarter_colours(open_image(tmp_path / "palette.png")), [RED, GREEN, BLUE, WHITE])
    corners().convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    assert near(quarter_colours(open_image(tmp_path / "cmyk.jpg")), [RED, GREEN, BLUE, WHITE])
    Image.new("L", (3, 3), 77).save(tmp_path / "grey.jpg")
    assert open_image(tmp_path / "grey.jpg").getpixel((1, 1)) == (77, 77, 77)
    Image.new("1", (3, 3), 1).save(tmp_path / "bits.png")
    assert open_image(tmp_path / "bits.png").getpixel((1, 1)) == WHITE


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 257 * 100, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    assert np.array(open_image(tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 100, 255]
    Image.fromarray(values.astype(np.int32)).save(tmp_path / "deep.tiff")
    assert np.array(open_image(tmp_path / "deep.tiff"))[0, :, 0].tolist() == [0, 100, 255]


def test_unknown_ranges_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.array([[70_000]], dtype=np.int32)).save(tmp_path / "beyond.tiff")
    Image.fromarray(np.array([[0.5]], dtype=np.float32)).save(tmp_path / "float.tiff")
    for name in ("beyond.tiff", "float.tiff"):
        with pytest.raises(DartLabError, match="16 bits"):
            open_image(tmp_path / name)


def test_one_pixel(tmp_path: Path) -> None:
    Image.new("RGB", (1, 1), BLUE).save(tmp_path / "dot.png")
    assert open_image(tmp_path / "dot.png").getpixel((0, 0)) == BLUE


def test_a_huge_jpeg_is_decoded_small(tmp_path: Path) -> None:
    Image.new("L", (12_000, 9_000), 200).save(tmp_path / "huge.jpg", quality=50)
    picture = open_image(tmp_path / "huge.jpg")
    assert picture.mode == "RGB"
    assert (picture.width, picture.height) == (3000, 2250)
    assert picture.getpixel((5, 5)) == (200, 200, 200)


def test_shrinking_averages(tmp_path: Path) -> None:
    board = (np.indices((40, 40)).sum(axis=0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(tmp_path / "board.png")
    small = open_image(tmp_path / "board.png", max_side=20)
    assert small.size == (20, 20)
    assert np.isin(np.array(small), (127, 128)).all()


def test_a_first_frame_is_taken(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), RED).save(
        tmp_path / "moving.gif", save_all=True, append_images=[Image.new("RGB", (4, 4), BLUE)]
    )
    assert open_image(tmp_path / "moving.gif").getpixel((0, 0)) == RED


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Kind of fault → (path, words that the message must hold)."""
    text = folder / "text.jpg"
    text.write_text("this is not a picture")
    empty = folder / "empty.png"
    empty.touch()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = folder / "whole.jpg"
    Image.fromarray(noise).save(whole)
    cut_jpeg = folder / "cut.jpg"
    cut_jpeg.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    Image.fromarray(noise).save(folder / "whole.png")
    cut_png = folder / "cut.png"
    cut_png.write_bytes((folder / "whole.png").read_bytes()[:400])
    damaged = bytearray((folder / "whole.png").read_bytes())
    damaged[60:70] = b"0123456789"
    (folder / "damaged.png").write_bytes(bytes(damaged))
    return {
        "missing": (folder / "nothing.png", "no such picture"),
        "folder": (folder, "is a folder"),
        "text": (text, "not a picture"),
        "empty": (empty, "not a picture"),
        "cut jpeg": (cut_jpeg, "cut short"),
        "cut png": (cut_png, "cut short"),
        "damaged png": (folder / "damaged.png", "damaged"),
    }


@pytest.mark.parametrize("fault", ["missing", "folder", "text", "empty", "cut jpeg", "cut png", "damaged png"])
def test_bad_files_give_one_line(tmp_path: Path, fault: str) -> None:
    path, words = bad_files(tmp_path)[fault]
    with pytest.raises(DartLabError, match=words) as caught:
        open_image(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message


def test_no_permission_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret.png"
    Image.new("RGB", (2, 2)).save(file)
    file.chmod(0)
    if os.access(file, os.R_OK):  # an administrator may read everything: let opening fail as it would for others
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", str(file))

        monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(DartLabError, match="no permission"):
        open_image(file)


@pytest.mark.parametrize("side", [12_500, 20_000])
def test_too_many_pixels_are_refused_before_decoding(tmp_path: Path, side: int) -> None:
    """12,500² is over our limit alone, 20,000² over Pillow's own too."""
    assert side * side > MAX_PIXELS
    file = tmp_path / "bomb.png"
    Image.new("1", (side, side)).save(file)
    with pytest.raises(DartLabError, match="150,000,000"):
        open_image(file)


def test_strips_are_refused() -> None:
    check_aspect(Image.new("RGB", (MAX_ASPECT, 1)))
    with pytest.raises(DartLabError, match="1×201"):
        check_aspect(Image.new("RGB", (1, MAX_ASPECT + 1)))


def test_a_strip_is_named_by_its_file_and_its_own_size(tmp_path: Path) -> None:
    file = tmp_path / "strip.png"
    Image.new("RGB", (10_000, 49)).save(file)  # shrunk while reading it would pass
    with pytest.raises(DartLabError, match=r"strip.png is 10000×49 pixels"):
        open_image(file)
    Image.new("RGB", (10_000, 50)).save(file)
    assert open_image(file).width == 3334
