"""One picture of the drawn world: which objects are in it, where, and the pixels that show them.

Nothing in the world prefers a place: positions are drawn evenly over the canvas, and ways up from a set that is closed
under both mirrorings, so a mirrored picture is as likely as the picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from dart_lab.errors import DartLabError
from dart_lab.tasks import drawing

CANVAS = 336  # side of a whole picture, pixels
SHAPES: tuple[str, ...] = tuple(drawing.OUTLINES)
COLORS: tuple[str, ...] = tuple(drawing.COLORS)
FEWEST, MOST = 4, 8  # objects on a whole picture
COUNTS = (1, 2, 3, 4)  # answers of the counting questions
RADIUS_RATIO = 1.45  # largest over smallest radius on one picture
OVERHANG = 0.3  # part of its radius by which an object may be cut by the border
GAP = 4.0  # least distance between two objects, pixels
TURN = 0.35  # largest turn of an object, radians
PLATE_SHARE = 0.85  # share of whole pictures with a plate
TEXTURED_SHARE = 0.5
CLUTTERED_SHARE = 0.7
PLACEMENT_TRIES = 60
SMALLEST_SIDE = 112  # of a window, pixels; it holds any object


@dataclass(frozen=True)
class Thing:
    """A drawn object; ``x``, ``y`` (center) and ``radius`` in pixels, ``turn`` in radians, ``flips`` (across, down)."""

    shape: str
    color: str
    x: float
    y: float
    radius: float
    turn: float
    flips: tuple[bool, bool]

    @property
    def name(self) -> str:
        """Color and shape, as questions call it: ``"red circle"``."""
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class Plate:
    """A two-digit number plate; ``left``, ``top`` and ``em`` (the width of a digit) in pixels."""

    digits: str
    left: int
    top: int
    em: int
    dark: bool

    @property
    def stroke(self) -> int:
        """Width of a digit's lines, pixels."""
        return max(3, self.em // 4)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return 2 * self.em + 5 * self.stroke, 2 * self.em + 4 * self.stroke

    @property
    def box(self) -> tuple[int, int, int, int]:
        """First and last pixel, ``(x0, y0, x1, y1)``, both on the plate."""
        width, height = self.size
        return self.left, self.top, self.left + width - 1, self.top + height - 1

    @property
    def corners(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Upper left corners of the two digits, pixels."""
        top = self.top + 2 * self.stroke
        first = self.left + 3 * self.stroke // 2
        return (first, top), (first + self.em + 2 * self.stroke, top)


@dataclass(frozen=True)
class Scene:
    """A picture and all that is known about it.

    ``index`` is ``(side, side)`` uint8: 0 ground, ``i + 1`` object i, ``len(things) + 1`` the plate. ``origin`` is the
    picture's upper left corner on the canvas, pixels; it is (0, 0) for whole pictures. ``counted`` names the shape and
    the color whose numbers were drawn evenly; counting questions ask for these.
    """

    side: int
    things: tuple[Thing, ...]
    plate: Plate | None
    image: Image.Image
    index: np.ndarray
    origin: tuple[int, int]
    counted: tuple[str, str]

    def box(self, number: int) -> tuple[float, float, float, float]:
        """Box ``(x0, y0, x1, y1)`` in pixels, ends excluded, of entry ``number`` of the index map."""
        rows, columns = np.nonzero(self.index == number)
        return float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)


def _place_plate(rng: np.random.Generator, side: int) -> Plate:
    digits = str(rng.integers(10, 100))
    blank = Plate(digits, 0, 0, int(rng.integers(18, 25)), bool(rng.integers(2)))
    width, height = blank.size
    left, top = (int(rng.integers(0, side - length + 1)) for length in (width, height))
    return Plate(digits, left, top, blank.em, blank.dark)


def _free(x: float, y: float, radius: float, placed: list[tuple[float, float, float]], plate: Plate | None) -> bool:
    if plate is not None:
        x0, y0, x1, y1 = plate.box
        nearest_x, nearest_y = min(max(x, x0), x1), min(max(y, y0), y1)
        if (x - nearest_x) ** 2 + (y - nearest_y) ** 2 < (radius + GAP) ** 2:
            return False
    return all((x - a) ** 2 + (y - b) ** 2 >= (radius + r + GAP) ** 2 for a, b, r in placed)


def _place_things(
    rng: np.random.Generator, side: int, wanted: int, smallest: float, plate: Plate | None
) -> list[tuple[float, float, float]]:
    placed: list[tuple[float, float, float]] = []
    for _ in range(wanted):
        for _ in range(PLACEMENT_TRIES):
            radius = float(rng.uniform(smallest, RADIUS_RATIO * smallest))
            margin = (1 - OVERHANG) * radius
            x, y = (float(value) for value in rng.uniform(margin, side - margin, size=2))
            if _free(x, y, radius, placed, plate):
                placed.append((x, y, radius))
                break
    return placed


def _assign(rng: np.random.Generator, names: tuple[str, ...], n: int, count: int) -> tuple[str, list[str]]:
    """``n`` names of which exactly ``count`` are one drawn target and the rest are other names, in random order."""
    target = names[int(rng.integers(len(names)))]
    others = [name for name in names if name != target]
    chosen = [target] * count + [others[int(i)] for i in rng.integers(0, len(others), size=n - count)]
    return target, [chosen[int(i)] for i in rng.permutation(n)]


def compose(
    rng: np.random.Generator,
    side: int = CANVAS,
    *,
    origin: tuple[int, int] = (0, 0),
    count: int | None = None,
    plate: bool | None = None,
) -> Scene:
    """Draw one scene.

    Args:
        rng: source of all randomness; the same state gives the same bytes.
        side: side of the picture in pixels; smaller than the canvas for windows of it, objects keep their size.
        origin: upper left corner of the picture on the canvas, pixels.
        count: number of objects that share the counted shape, and of those that share the counted color; by default
            each is drawn evenly from ``COUNTS``.
        plate: whether there is a number plate; by default drawn with ``PLATE_SHARE`` (windows: less).

    Raises:
        DartLabError: the side is too small for the objects or larger than the canvas.

    >>> scene = compose(np.random.Generator(np.random.PCG64(0)))
    >>> scene.image.size, scene.index.shape, 1 <= len(scene.things) <= MOST
    ((336, 336), (336, 336), True)
    """
    if not SMALLEST_SIDE <= side <= CANVAS:
        raise DartLabError(f"side is {side}: give {SMALLEST_SIDE} to {CANVAS} pixels")
    share = (side / CANVAS) ** 2
    crowd = int(rng.integers(FEWEST, MOST + 1))
    wanted = crowd if side == CANVAS else max(1, int(crowd * share + rng.uniform(0.5, 1.9)))
    with_plate = bool(rng.random() < PLATE_SHARE * share**0.5) if plate is None else plate
    plate_drawn = _place_plate(rng, side) if with_plate else None
    smallest = 30 + 3.0 * (MOST - crowd)
    placed = _place_things(rng, side, wanted, smallest, plate_drawn)
    if not placed:  # a plate in the middle of a small window leaves no room
        plate_drawn = None
        placed = _place_things(rng, side, wanted, smallest, None)
    n = len(placed)
    counts = [min(n, int(rng.choice(COUNTS)) if count is None else count) for _ in range(2)]
    counted_shape, shapes = _assign(rng, SHAPES, n, counts[0])
    counted_color, colors = _assign(rng, COLORS, n, counts[1])
    turns = rng.uniform(-TURN, TURN, size=n)
    flips = rng.integers(0, 2, size=(n, 2)).astype(bool)
    things = tuple(
        Thing(shape, color, x, y, radius, float(turn), (bool(across), bool(down)))
        for shape, color, (x, y, radius), turn, (across, down) in zip(shapes, colors, placed, turns, flips, strict=True)
    )
    picture = drawing.draw_ground(rng, side, bool(rng.random() < TEXTURED_SHARE))
    if rng.random() < CLUTTERED_SHARE:
        drawing.draw_clutter(rng, picture, max(2, int(rng.integers(15, 61) * share)))
    index = drawing.draw_index(side, things, plate_drawn)
    drawing.paint_things(rng, picture, index, things)
    if plate_drawn is not None:
        drawing.paint_plate(picture, plate_drawn)
    return Scene(side, things, plate_drawn, picture, np.asarray(index), origin, (counted_shape, counted_color))
