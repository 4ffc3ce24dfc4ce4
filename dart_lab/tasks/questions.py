"""Questions about a scene, with exact answers: families of questions, each with a closed set of answers a template.

``FAMILIES`` are the seven that a task asks by default; ``place`` is asked only where it is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dart_lab.tasks.scene import CANVAS, COLORS, COUNTS, SHAPES, Scene, Thing

YES_NO = ("yes", "no")
CELLS = 6  # rows and columns of the cells that grounding questions name
CELL = CANVAS // CELLS  # pixels
CELL_MARGIN = 5.0  # least distance of an asked-about center from the border of its cell, pixels
RELATION_GAP = 0.15 * CANVAS  # least distance along the asked axis, pixels
DIRECTIONS: dict[str, tuple[int, int]] = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
PLURALS: dict[str, str] = {shape: "crosses" if shape == "cross" else f"{shape}s" for shape in SHAPES}
COLOR_FACTS: dict[str, str] = {
    "red": "tomato", "orange": "carrot", "yellow": "banana", "green": "grass",
    "cyan": "ice", "blue": "sky", "purple": "plum", "pink": "pig",
}  # fmt: skip
SHAPE_FACTS: dict[str, str] = {
    "circle": "ball", "square": "box", "triangle": "roof", "star": "night",
    "ring": "finger", "cross": "hospital", "heart": "love", "arrow": "bow",
}  # fmt: skip
CELL_NAMES: tuple[str, ...] = tuple(f"{chr(ord('a') + x)}{y + 1}" for y in range(CELLS) for x in range(CELLS))
QUARTERS: tuple[str, ...] = ("top left", "top right", "bottom left", "bottom right")
QUARTER_MARGIN = 0.08  # least distance of an asked-about center from both midlines, in sides of the picture
NUMBERS: tuple[str, ...] = tuple(str(number) for number in range(10, 100))


@dataclass(frozen=True)
class Question:
    """A question, its exact answer, the closed set the answer is from, and the index-map numbers of its referents."""

    family: str
    text: str
    answer: str
    choices: tuple[str, ...]
    referents: tuple[int, ...]


def _pick(rng: np.random.Generator, options: list[int]) -> int:
    return options[int(rng.integers(len(options)))]


def _unique(scene: Scene, key: Callable[[Thing], str]) -> list[int]:
    """Numbers of the objects that alone have their value of ``key``."""
    values = [key(thing) for thing in scene.things]
    counts = Counter(values)
    return [i for i, value in enumerate(values) if counts[value] == 1]


def _shape(thing: Thing) -> str:
    return thing.shape


def _color(thing: Thing) -> str:
    return thing.color


def _name(thing: Thing) -> str:
    return thing.name


def _exist(scene: Scene, rng: np.random.Generator, want: int | None) -> Question | None:
    present = {thing.name for thing in scene.things}
    yes = bool(rng.integers(2)) if want is None else want % 2 == 0
    if yes:
        name = scene.things[int(rng.integers(len(scene.things)))].name
    else:
        near = sorted({f"{a.color} {b.shape}" for a in scene.things for b in scene.things} - present)
        every = [f"{color} {shape}" for color in COLORS for shape in SHAPES if f"{color} {shape}" not in present]
        pool = near if near and rng.random() < 0.5 else every
        name = pool[int(rng.integers(len(pool)))]
    article = "an" if name[0] in "aeiou" else "a"
    referents = tuple(i + 1 for i, thing in enumerate(scene.things) if thing.name == name)
    return Question("exist", f"is there {article} {name}?", YES_NO[0 if yes else 1], YES_NO, referents)


def _by_one_property(
    scene: Scene, rng: np.random.Generator, want: int | None, family: str, by_shape: str, by_color: str,
    color_answers: dict[str, str], shape_answers: dict[str, str],
) -> Question | None:  # fmt: skip
    """Ask for the color of an object named by its shape (even ``want``) or for the shape of one named by its color."""
    ask_color = bool(rng.integers(2)) if want is None else want % 2 == 0
    options = _unique(scene, _shape if ask_color else _color)
    if not options:
        return None
    i = _pick(rng, options)
    thing = scene.things[i]
    if ask_color:
        text, answer, choices = by_shape.format(thing.shape), color_answers[thing.color], color_answers.values()
    else:
        text, answer, choices = by_color.format(thing.color), shape_answers[thing.shape], shape_answers.values()
    return Question(family, text, answer, tuple(choices), (i + 1,))


def _attribute(scene: Scene, rng: np.random.Generator, want: int | None) -> Question | None:
    same_color, same_shape = {name: name for name in COLORS}, {name: name for name in SHAPES}
    return _by_one_property(
        scene, rng, want, "attribute", "what color is the {}?", "what shape is the {} object?", same_color, same_shape
    )


def _knowledge(scene: Scene, rng: np.random.Generator, want: int | None) -> Question | None:
    return _by_one_property(
        scene, rng, want, "knowledge", "which thing has the color of the {}?", "which word goes with the {} object?",
        COLOR_FACTS, SHAPE_FACTS,
    )  # fmt: skip


def _relation(scene: Scene, rng: np.random.Generator, want: int | None) -> Question | None:
    options = _unique(scene, _name)
    directions = list(DIRECTIONS)
    direction = directions[int(rng.integers(4)) if want is None else (want // 2) % 4]
    axis, sign = DIRECTIONS[direction]
    yes = bool(rng.integers(2)) if want is None else want % 2 == 0
    place = [(thing.x, thing.y)[axis] for thing in scene.things]
    towards = sign if yes else -sign
    pairs = [(i, j) for i in options for j in options if towards * (place[i] - place[j]) >= RELATION_GAP]
    if not pairs:
        return None
    i, j = pairs[int(rng.integers(len(pairs)))]
    text = f"is the {scene.things[i].name} {direction} the {scene.things[j].name}?"
    return Question("relation", text, YES_NO[0 if yes else 1], YES_NO, (i + 1, j + 1))


def _count(scene: Scene, rng: np.random.Generator, want: int | None) -> Question | None:
    shape, color = scene.counted
    ask_color = bool(rng.integers(2)) if want is None else (want // len(COUNTS)) % 2 == 0
    key, value = (_color, color) if ask_color else (_shape, shape)
    found = tuple(i + 1 for i, thing in enumerate(scene.things) if key(thing) == value)
    noun = color if ask_color else PLURALS[shape]
    choices = tuple(str(count) for count in COUNTS)
    return Question("count", f"how many objects are {noun}?", str(len(found)), choices, found)


def cell_of(scene: Scene, thing: Thing) -> tuple[int, int]:
    """Column and row of the cell of the canvas that holds the object's center."""
    x, y = thing.x + scene.origin[0], thing.y + scene.origin[1]
    return int(x // CELL), int(y // CELL)


def _ground(scene: Scene, rng: np.random.Generator, want: int | None) -> Question | None:
    def inside(i: int) -> bool:
        thing = scene.things[i]
        offsets = [(thing.x + scene.origin[0]) % CELL, (thing.y + scene.origin[1]) % CELL]
        return all(CELL_MARGIN <= offset <= CELL - CELL_MARGIN for offset in offsets)

    options = [i for i in _unique(scene, _name) if inside(i)]
    if not options:
        return None
    i = _pick(rng, options)
    column, row = cell_of(scene, scene.things[i])
    text = f"which cell holds the {scene.things[i].name}?"
    return Question("ground", text, CELL_NAMES[row * CELLS + column], CELL_NAMES, (i + 1,))


def _text(scene: Scene, rng: np.random.Generator, want: int | None) -> Question | None:
    if scene.plate is None:
        return None
    number = len(scene.things) + 1
    return Question("text", "what number is on the plate?", scene.plate.digits, NUMBERS, (number,))


def quarter_of(scene: Scene, thing: Thing) -> int | None:
    """Number in ``QUARTERS`` of the quarter of the picture that holds the object's center; None near a midline."""
    x, y = thing.x / scene.side - 0.5, thing.y / scene.side - 0.5
    return None if min(abs(x), abs(y)) < QUARTER_MARGIN else 2 * (y > 0) + (x > 0)


def _place(scene: Scene, rng: np.random.Generator, want: int | None) -> Question | None:
    quarters = {i: quarter_of(scene, scene.things[i]) for i in _unique(scene, _name)}
    wanted = int(rng.integers(len(QUARTERS))) if want is None else want % len(QUARTERS)
    options = [i for i, quarter in quarters.items() if quarter == wanted]
    if not options:
        return None
    i = _pick(rng, options)
    return Question("place", f"where is the {scene.things[i].name}?", QUARTERS[wanted], QUARTERS, (i + 1,))


_ASKERS: dict[str, Callable[[Scene, np.random.Generator, int | None], Question | None]] = {
    "exist": _exist,
    "attribute": _attribute,
    "relation": _relation,
    "count": _count,
    "ground": _ground,
    "text": _text,
    "knowledge": _knowledge,
    "place": _place,
}
FAMILIES: tuple[str, ...] = tuple(family for family in _ASKERS if family != "place")
ALL_FAMILIES: tuple[str, ...] = tuple(_ASKERS)


def ask(scene: Scene, family: str, rng: np.random.Generator, want: int | None = None) -> Question | None:
    """One question of a family about a scene, or None where the scene has none.

    Args:
        scene: the picture asked about.
        family: one of ``ALL_FAMILIES``.
        rng: source of the random choices.
        want: a running number by which answers and templates take turns, so that they are balanced exactly; by
            default they are drawn.

    >>> from dart_lab.tasks.scene import compose
    >>> rng = np.random.Generator(np.random.PCG64(1))
    >>> ask(compose(rng), "exist", rng, want=0).answer
    'yes'
    """
    return _ASKERS[family](scene, rng, want)
