"""How the drawn world looks: shapes, digits, grounds and clutter, in pixels.

Everything is drawn with Pillow's rasteriser from the numbers in a :class:`~dart_lab.tasks.scene.Scene`, without a font.
The same calls fill an index map beside the picture, so the map and the pixels agree exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from dart_lab.tasks.scene import Plate, Thing

Points = list[tuple[float, float]]

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 35),
    "orange": (245, 135, 15),
    "yellow": (245, 225, 35),
    "green": (35, 150, 45),
    "cyan": (40, 205, 215),
    "blue": (35, 65, 210),
    "purple": (125, 45, 165),
    "pink": (250, 125, 185),
}
COLOR_JITTER = 16  # largest change of a channel of an object's color, in grey levels
RING_HOLE = 0.55  # inner radius of a ring, in outer radii
STAR_WAIST = 0.45  # inner radius of a star, in outer radii


def _circle(radius: float = 1.0, corners: int = 28) -> Points:
    angles = [2 * math.pi * i / corners for i in range(corners)]
    return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]


def _regular(corners: int, waist: float | None = None) -> Points:
    steps = corners if waist is None else 2 * corners
    radii = [1.0 if waist is None or i % 2 == 0 else waist for i in range(steps)]
    angles = [-math.pi / 2 + 2 * math.pi * i / steps for i in range(steps)]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _heart(corners: int = 26) -> Points:
    turns = [2 * math.pi * i / corners for i in range(corners)]
    xs = [16 * math.sin(t) ** 3 for t in turns]
    ys = [-(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) - 2.5 for t in turns]
    largest = max(math.hypot(x, y) for x, y in zip(xs, ys, strict=True))
    return [(x / largest, y / largest) for x, y in zip(xs, ys, strict=True)]


_ARM = 0.33
OUTLINES: dict[str, Points] = {
    "circle": _circle(),
    "square": [(-0.71, -0.71), (0.71, -0.71), (0.71, 0.71), (-0.71, 0.71)],
    "triangle": _regular(3),
    "star": _regular(5, STAR_WAIST),
    "ring": _circle(),
    "cross": [(-_ARM, -0.94), (_ARM, -0.94), (_ARM, -_ARM), (0.94, -_ARM), (0.94, _ARM), (_ARM, _ARM),
              (_ARM, 0.94), (-_ARM, 0.94), (-_ARM, _ARM), (-0.94, _ARM), (-0.94, -_ARM), (-_ARM, -_ARM)],
    "heart": _heart(),
    "arrow": [(0.0, -1.0), (0.75, -0.15), (0.3, -0.15), (0.3, 0.95), (-0.3, 0.95), (-0.3, -0.15), (-0.75, -0.15)],
}  # fmt: skip

# Strokes of the digits in a box one wide and two tall; y grows downwards.
_SIX: Points = [(0.9, 0.0), (0.3, 0.5), (0.0, 1.2), (0.1, 1.8), (0.5, 2.0), (0.9, 1.8), (1.0, 1.4), (0.8, 1.05),
                (0.4, 1.0), (0.05, 1.25)]  # fmt: skip
DIGITS: dict[str, tuple[Points, ...]] = {
    "0": ([(0.5, 0.0), (0.85, 0.2), (1.0, 1.0), (0.85, 1.8), (0.5, 2.0), (0.15, 1.8), (0.0, 1.0), (0.15, 0.2),
           (0.5, 0.0)],),
    "1": ([(0.15, 0.5), (0.6, 0.0), (0.6, 2.0)],),
    "2": ([(0.0, 0.4), (0.3, 0.0), (0.7, 0.0), (1.0, 0.4), (1.0, 0.7), (0.0, 2.0), (1.0, 2.0)],),
    "3": ([(0.0, 0.0), (1.0, 0.0), (0.45, 0.8), (0.8, 0.9), (1.0, 1.3), (1.0, 1.6), (0.7, 2.0), (0.3, 2.0),
           (0.0, 1.7)],),
    "4": ([(0.75, 2.0), (0.75, 0.0), (0.0, 1.4), (1.0, 1.4)],),
    "5": ([(1.0, 0.0), (0.1, 0.0), (0.0, 0.9), (0.6, 0.8), (1.0, 1.1), (1.0, 1.6), (0.6, 2.0), (0.0, 1.9)],),
    "6": (_SIX,),
    "7": ([(0.0, 0.0), (1.0, 0.0), (0.35, 2.0)],),
    "8": ([(0.5, 0.0), (0.9, 0.2), (0.9, 0.7), (0.5, 0.95), (0.1, 0.7), (0.1, 0.2), (0.5, 0.0)],
          [(0.5, 0.95), (1.0, 1.25), (1.0, 1.75), (0.5, 2.0), (0.0, 1.75), (0.0, 1.25), (0.5, 0.95)]),
    "9": ([(1.0 - x, 2.0 - y) for x, y in _SIX],),
}  # fmt: skip


def outline(thing: Thing, scale: float = 1.0) -> Points:
    """Corners of an object's outline in pixels, turned and mirrored as the object is."""
    cos, sin = math.cos(thing.turn), math.sin(thing.turn)
    size = thing.radius * scale
    flip_x, flip_y = (-1.0 if flip else 1.0 for flip in thing.flips)
    return [
        (thing.x + size * flip_x * (cos * x - sin * y), thing.y + size * flip_y * (sin * x + cos * y))
        for x, y in OUTLINES[thing.shape]
    ]


def draw_index(side: int, things: tuple[Thing, ...], plate: Plate | None) -> Image.Image:
    """Index map, an ``L`` image: 0 is ground, ``i + 1`` is object i, ``len(things) + 1`` is the plate."""
    index = Image.new("L", (side, side), 0)
    pen = ImageDraw.Draw(index)
    for number, thing in enumerate(things, start=1):
        pen.polygon(outline(thing), fill=number)
        if thing.shape == "ring":
            pen.polygon(outline(thing, RING_HOLE), fill=0)
    if plate is not None:
        pen.rectangle(plate.box, fill=len(things) + 1)
    return index


def draw_ground(rng: np.random.Generator, side: int, textured: bool) -> Image.Image:
    """A flat or a textured greyish ground, an ``RGB`` image of ``side`` by ``side`` pixels."""
    base = rng.integers(60, 200) + rng.integers(-18, 19, size=3)
    if not textured:
        return Image.new("RGB", (side, side), tuple(int(value) for value in base))
    rows, columns = (int(cells) for cells in rng.integers(2, 28, size=2))
    cells = base + rng.integers(-35, 36, size=(rows, columns, 1)) + rng.integers(-6, 7, size=(rows, columns, 3))
    tile = Image.fromarray(np.clip(cells, 0, 255).astype(np.uint8), "RGB")
    smooth = Image.Resampling.BILINEAR if rng.random() < 0.6 else Image.Resampling.NEAREST
    return tile.resize((side, side), smooth)


def draw_clutter(rng: np.random.Generator, picture: Image.Image, pieces: int) -> None:
    """Grey lines, rectangles and triangles, scattered evenly over the picture and beyond its border."""
    pen = ImageDraw.Draw(picture)
    side = picture.size[0]
    kinds = rng.integers(0, 3, size=pieces)
    greys = rng.integers(25, 230, size=pieces)
    centers = rng.uniform(-10, side + 10, size=(pieces, 2))
    spreads = rng.uniform(-28, 28, size=(pieces, 3, 2))
    widths = rng.integers(1, 6, size=pieces)
    for kind, grey, (x, y), spread, width in zip(kinds, greys, centers, spreads, widths, strict=True):
        ink = (int(grey),) * 3
        corners = [(float(x + dx), float(y + dy)) for dx, dy in spread]
        if kind == 0:
            pen.line(corners[:2], fill=ink, width=int(width))
        elif kind == 1:
            half_x, half_y = 2 + abs(float(spread[0, 0])) / 2, 2 + abs(float(spread[0, 1])) / 2
            pen.rectangle((float(x) - half_x, float(y) - half_y, float(x) + half_x, float(y) + half_y), fill=ink)
        else:
            pen.polygon(corners, fill=ink)


def paint_things(rng: np.random.Generator, picture: Image.Image, index: Image.Image, things: tuple[Thing, ...]) -> None:
    """Fill every object's pixels of the index map with its color, a little changed from object to object."""
    palette = np.zeros((256, 3), dtype=np.uint8)
    for number, thing in enumerate(things, start=1):
        jitter = rng.integers(-COLOR_JITTER, COLOR_JITTER + 1, size=3)
        palette[number] = np.clip(np.array(COLORS[thing.color]) + jitter, 0, 255)
    colored = Image.frombytes("P", index.size, index.tobytes())
    colored.putpalette(palette.tobytes())
    picture.paste(colored.convert("RGB"), mask=index.point([0] + [255] * 255))


def paint_plate(picture: Image.Image, plate: Plate) -> None:
    """A black or white plate with its two digits in the other ink."""
    pen = ImageDraw.Draw(picture)
    ink, paper = ((255,) * 3, (0,) * 3) if plate.dark else ((0,) * 3, (255,) * 3)
    pen.rectangle(plate.box, fill=paper, outline=ink)
    for digit, (left, top) in zip(plate.digits, plate.corners, strict=True):
        for stroke in DIGITS[digit]:
            points = [(left + plate.em * x, top + plate.em * y) for x, y in stroke]
            pen.line(points, fill=ink, width=plate.stroke, joint="curve")
