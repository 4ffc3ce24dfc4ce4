"""Reading pictures: every common kind of file becomes upright 8-bit RGB, or one clear line of error."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dart_lab.errors import DartLabError

MAX_PIXELS = 150_000_000
MAX_SIDE = 4096
MAX_ASPECT = 200

_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_SIXTEEN_BIT_MAX = 65_535
_REDUCIBLE_MODES = ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr")


def open_image(path: str | os.PathLike[str], *, max_side: int = MAX_SIDE) -> Image.Image:
    """Read a picture file as upright RGB.

    The EXIF rotation is applied, transparency is laid over white, grey, palette, CMYK and 16-bit pictures are
    converted; of an animation the first frame is taken. A picture whose longer side exceeds `max_side` pixels is shrunk
    by a whole factor while reading (JPEG files are decoded at the smaller size, so memory stays small).

    Args:
        path: JPEG, PNG, WebP, GIF, TIFF, BMP or another format that Pillow reads.
        max_side: longest side of the result in pixels. Default 4096.

    Returns:
        A picture in mode "RGB", detached from its file.

    Raises:
        DartLabError: the file is missing, a folder, not readable, not a picture, broken, has more than 150 million
            pixels, or one side more than 200 times as long as the other.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "grey.png"
    >>> Image.new("L", (4, 2), 128).save(file)
    >>> open_image(file).getpixel((0, 0))
    (128, 128, 128)
    """
    path = Path(path)
    try:
        there, folder = path.exists(), path.is_dir()
    except OSError as error:  # a name longer than the file system takes
        raise DartLabError(f"{path}: no such picture ({error.strerror}); check the path") from error
    if not there:
        raise DartLabError(f"{path}: no such picture; check the path")
    if folder:
        raise DartLabError(f"{path} is a folder; give the path of one picture")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is checked below
            opened = Image.open(path)
        with opened as picture:
            _check_size(picture, path)
            check_aspect(picture, name=str(path))
            picture.draft(None, (max_side, max_side))
            picture.load()
            if picture.mode in _REDUCIBLE_MODES:  # the others must become RGB before pixels can be averaged
                return to_rgb(_shrink(ImageOps.exif_transpose(picture), max_side), name=str(path))
            return _shrink(to_rgb(ImageOps.exif_transpose(picture), name=str(path)), max_side)
    except Image.DecompressionBombError:
        raise DartLabError(f"{path}: more than {MAX_PIXELS:,} pixels; shrink the picture first") from None
    except PermissionError:
        raise DartLabError(f"{path} may not be read: no permission; change its rights or copy it") from None
    except UnidentifiedImageError:
        raise DartLabError(
            f"{path} is not a picture that can be read; give a JPEG, PNG or WebP file"
        ) from None
    except DartLabError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow raises for damaged files
        raise DartLabError(f"{path} is damaged or cut short ({_one_line(error)}); save or download it again") from error


def to_rgb(picture: Image.Image, *, name: str = "picture") -> Image.Image:
    """Convert a Pillow picture of any mode to 8-bit RGB; transparency over white, 16-bit grey scaled to 8 bits.

    Raises:
        DartLabError: floating-point pixels, or integers beyond 16 bits, whose range is not known.

    >>> to_rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0))
    (255, 255, 255)
    """
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture.copy()
    if picture.mode in _SIXTEEN_BIT_MODES:
        values = np.asarray(picture)
        if values.size and (values.min() < 0 or values.max() > _SIXTEEN_BIT_MAX):
            raise DartLabError(f"{name}: pixel values beyond 16 bits; save it with 8 or 16 bits a channel")
        eight_bit = np.rint(np.linspace(0, 255, _SIXTEEN_BIT_MAX + 1)).astype(np.uint8)
        return Image.fromarray(eight_bit[values]).convert("RGB")
    if picture.mode == "F":
        raise DartLabError(f"{name}: floating-point pixels have no known range; save it with 8 or 16 bits a channel")
    if picture.has_transparency_data:
        coloured = picture.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return picture.convert("RGB")


def check_aspect(picture: Image.Image, *, name: str = "picture") -> None:
    """Raise `DartLabError` for a strip so long that scaling its short side to the model's size exhausts memory."""
    width, height = picture.size
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise DartLabError(
            f"{name} is {width}×{height} pixels; one side may be at most {MAX_ASPECT} times the other: crop it"
        )


def _check_size(picture: Image.Image, path: Path) -> None:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise DartLabError(
            f"{path}: {width}×{height} pixels are more than the limit of {MAX_PIXELS:,}; shrink the picture first"
        )


def _shrink(picture: Image.Image, max_side: int) -> Image.Image:
    """Divide both sides by the smallest whole factor that brings the longer one to `max_side`."""
    factor = -(-max(picture.size) // max_side)
    return picture.reduce(factor) if factor > 1 else picture


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
