"""Training batches of the drawn world: windows of the canvas, what every patch shows, and packed questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dart_lab.tasks import questions, scene
from dart_lab.tiny import words
from dart_lab.tiny.network import Text

Spans = list[list[tuple[int, int, int]]]  # for every picture and question: family, position before the answer, tokens
PATCH = 14
COVERED = 0.15  # part of a patch that an object must cover to name it
NONE = 0  # class of a patch without shape, color or digit
PLATE = len(scene.SHAPES) + 1  # shape class of the plate
SHAPE_CLASSES = len(scene.SHAPES) + 2
COLOR_CLASSES = len(scene.COLORS) + 1
DIGIT_CLASSES = 1 + 2 * 10  # none, then digit by slot
STRIPS = 12  # columns and rows of the canvas by which a noun tells the place of its referent
LOCATED = ("relation", "ground")  # families whose nouns do
TAGS = len(scene.SHAPES) + len(scene.COLORS) + 1  # what the class token should tell


@dataclass
class Patches:
    """What the patches show, ``(batch, patches)`` each: classes int64, ``center`` float (an object's weights sum to 1).

    ``column`` and ``row`` are the cell of the covering object's center, -1 without one; ``tags`` is (batch, TAGS).
    """

    shape: Tensor
    color: Tensor
    digit: Tensor
    column: Tensor
    row: Tensor
    center: Tensor
    tags: Tensor


@dataclass
class Batch:
    """One training batch; ``family`` numbers the question of every answer token that is scored, -1 elsewhere.

    ``pixels`` (batch, 3, side, side) in -1..1, ``target`` (batch, text) next token. ``count_at`` (rows, 2): batch index
    and text position of the nouns that are counted, ``count_target`` (rows, patches) the weights on matching centers.
    ``referent_at`` (nouns, 2) and ``referent_strip`` (nouns, 2): where nouns are in the text, and the column and row of
    their referents. ``answers`` are the spans of every picture's answers, see ``pack``.
    """

    pixels: Tensor
    origin: Tensor
    patches: Patches
    text: Text
    target: Tensor
    family: Tensor
    count_at: Tensor
    count_target: Tensor
    referent_at: Tensor
    referent_strip: Tensor
    answers: Spans


def normalise(images: Sequence[np.ndarray]) -> Tensor:
    """(batch, 3, side, side) in -1..1 from RGB arrays (side, side, 3) uint8."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().float().mul_(2 / 255).sub_(1)


def center_weights(drawn: scene.Scene) -> np.ndarray:
    """(things, patches): every object's center shared among its four nearest patches, bilinearly."""
    grid = drawn.side // PATCH
    weights = np.zeros((len(drawn.things), grid, grid), dtype=np.float32)
    for number, thing in enumerate(drawn.things):
        x, y = thing.x / PATCH - 0.5, thing.y / PATCH - 0.5
        column, row = int(np.floor(x)), int(np.floor(y))
        for i, part_y in ((row, row + 1 - y), (row + 1, y - row)):
            for j, part_x in ((column, column + 1 - x), (column + 1, x - column)):
                weights[number, min(max(i, 0), grid - 1), min(max(j, 0), grid - 1)] += part_x * part_y
    return weights.reshape(len(drawn.things), -1)


def covering(drawn: scene.Scene, patch_side: int = PATCH) -> np.ndarray:
    """(patches,) entry of the index map that covers most of every patch, 0 where less than ``COVERED`` is covered."""
    grid, classes = drawn.side // patch_side, len(drawn.things) + 2
    patch = np.arange(drawn.side) // patch_side
    keys = (patch[:, None] * grid + patch[None]) * classes + drawn.index
    counts = np.bincount(keys.ravel(), minlength=grid * grid * classes).reshape(-1, classes)
    best = counts[:, 1:].argmax(axis=1) + 1
    return np.where(counts[np.arange(grid * grid), best] >= COVERED * patch_side**2, best, 0)


def describe(drawn: scene.Scene, weights: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of :class:`Patches` for one picture."""
    grid = drawn.side // PATCH
    cover = covering(drawn)
    cells = [questions.cell_of(drawn, thing) for thing in drawn.things]
    shape_of = [NONE] + [1 + scene.SHAPES.index(thing.shape) for thing in drawn.things] + [PLATE]
    color_of = [NONE] + [1 + scene.COLORS.index(thing.color) for thing in drawn.things] + [NONE]
    tags = np.zeros(TAGS, dtype=np.float32)
    for thing in drawn.things:
        tags[scene.SHAPES.index(thing.shape)] = 1
        tags[len(scene.SHAPES) + scene.COLORS.index(thing.color)] = 1
    digit = np.full(grid * grid, NONE)
    if drawn.plate is not None:
        tags[-1] = 1
        middle = drawn.plate.left + drawn.plate.size[0] / 2
        slot = ((np.arange(grid * grid) % grid + 0.5) * PATCH > middle).astype(int)
        shown = np.array([int(figure) for figure in drawn.plate.digits])[slot]
        digit = np.where(cover == len(drawn.things) + 1, 1 + 10 * slot + shown, NONE)
    return {
        "shape": np.array(shape_of)[cover],
        "color": np.array(color_of)[cover],
        "digit": digit,
        "column": np.array([-1] + [column for column, _ in cells] + [-1])[cover],
        "row": np.array([-1] + [row for _, row in cells] + [-1])[cover],
        "center": weights.sum(axis=0),
        "tags": tags,
    }


def ask_many(
    drawn: scene.Scene, rng: np.random.Generator, wanted: int, shares: Sequence[float]
) -> list[questions.Question]:
    """Up to ``wanted`` different questions about a picture, families drawn by their shares."""
    found: dict[str, questions.Question] = {}
    families = rng.choice(len(questions.FAMILIES), size=3 * wanted, p=np.array(shares) / sum(shares))
    for family in families:
        question = questions.ask(drawn, questions.FAMILIES[int(family)], rng)
        if question is not None:
            found.setdefault(question.text, question)
        if len(found) == wanted:
            break
    return list(found.values())


def pack(
    asked: Sequence[Sequence[questions.Question]],
) -> tuple[Text, Tensor, Tensor, list[list[tuple[int, int, int]]]]:
    """Pack each picture's questions one behind the other: text, next tokens, families, and where each answer lies.

    The last are, for every question of every picture, its family, the position before its first answer token, and the
    number of its answer tokens with the end of text.
    """
    suffix = [words.IDS[word] for word in words.SUFFIX]
    lines: list[list[tuple[int, int, int, int, int]]] = []
    answers: Spans = []
    for of_picture in asked:
        line: list[tuple[int, int, int, int, int]] = []
        spans: list[tuple[int, int, int]] = []
        for segment, question in enumerate(of_picture):
            family = questions.FAMILIES.index(question.family)
            before, answer = (
                words.encode(question.text) + suffix,
                words.encode(question.answer) + [words.IDS[words.EOS]],
            )
            spans.append((family, len(line) + len(before) - 1, len(answer)))
            ids, scored = before + answer, len(before) - 1
            for place, token in enumerate(ids[:-1]):
                line.append((token, segment, place, ids[place + 1], family if place >= scored else -1))
        lines.append(line)
        answers.append(spans)
    length = max(len(line) for line in lines)
    padding = (words.IDS[words.PAD], -1, 0, words.IDS[words.PAD], -1)
    table = torch.tensor([line + [padding] * (length - len(line)) for line in lines])
    ids_, segment_, place_, target, scored_ = table.unbind(dim=-1)
    return Text(ids_, segment_, place_), target, scored_, answers


def make_batch(
    rng: np.random.Generator, *, grid: int, images: int, questions_each: int, shares: Sequence[float]
) -> Batch:
    """Draw a batch of windows of ``grid`` by ``grid`` patches at random places of the canvas, with their questions."""
    free = scene.CANVAS // PATCH - grid
    origins = rng.integers(0, free + 1, size=(images, 2))
    drawn = [scene.compose(rng, grid * PATCH, origin=(int(x) * PATCH, int(y) * PATCH)) for x, y in origins]
    weights = [center_weights(one) for one in drawn]
    described = [describe(one, weight) for one, weight in zip(drawn, weights, strict=True)]
    patches = Patches(**{key: torch.from_numpy(np.stack([one[key] for one in described])) for key in described[0]})
    asked = [ask_many(one, rng, questions_each, shares) for one in drawn] if questions_each else [[] for _ in drawn]
    text, target, family, answers = pack(asked) if questions_each else (_no_text(images), *_no_targets(images), [])
    count_at, count_target = [], []
    for i, of_picture in enumerate(asked):
        for question, (_, position, _) in zip(of_picture, answers[i] if answers else [], strict=True):
            if question.family == "count":
                count_at.append((i, position - len(words.SUFFIX) - 1))  # the noun before "?"
                count_target.append(weights[i][[number - 1 for number in question.referents]].sum(axis=0))
    referent_at, referent_strip = locate_nouns(drawn, asked, answers) if questions_each else ([], [])
    return Batch(
        pixels=normalise([np.asarray(one.image) for one in drawn]),
        origin=torch.from_numpy(origins),
        patches=patches,
        text=text,
        target=target,
        family=family,
        count_at=torch.tensor(count_at, dtype=torch.int64).view(-1, 2),
        count_target=torch.from_numpy(np.stack(count_target)) if count_target else torch.zeros(0, grid * grid),
        referent_at=torch.tensor(referent_at, dtype=torch.int64).view(-1, 2),
        referent_strip=torch.tensor(referent_strip, dtype=torch.int64).view(-1, 2),
        answers=answers,
    )


def locate_nouns(
    drawn: Sequence[scene.Scene], asked: Sequence[Sequence[questions.Question]], answers: Spans
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Picture and text position of every noun that names one object, and the column and row of that object."""
    shapes = {words.IDS[shape] for shape in scene.SHAPES}
    strip = scene.CANVAS / STRIPS
    at, strips = [], []
    for i, (one, of_picture, spans) in enumerate(zip(drawn, asked, answers, strict=True)):
        for question, (_, before_answer, _) in zip(of_picture, spans, strict=True):
            if question.family in LOCATED:
                ids = words.encode(question.text)
                start = before_answer + 1 - len(words.SUFFIX) - len(ids)
                nouns = [start + place for place, token in enumerate(ids) if token in shapes]
                for noun, number in zip(nouns, question.referents, strict=True):
                    thing = one.things[number - 1]
                    at.append((i, noun))
                    strips.append((int((thing.x + one.origin[0]) // strip), int((thing.y + one.origin[1]) // strip)))
    return at, strips


def _no_text(images: int) -> Text:
    empty = torch.zeros(images, 0, dtype=torch.int64)
    return Text(empty, empty, empty)


def _no_targets(images: int) -> tuple[Tensor, Tensor]:
    empty = torch.zeros(images, 0, dtype=torch.int64)
    return empty, empty
