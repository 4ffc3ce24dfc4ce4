"""The drawn world: answers derived anew from the objects, balance, masks against pixels, no preferred place."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageDraw

from dart_lab.errors import DartLabError
from dart_lab.tasks import drawing, load_task, questions, scene
from dart_lab.tasks.scene import CANVAS, Scene, Thing

ADJECTIVE = "|".join(scene.COLORS)
NOUN = "|".join(scene.SHAPES)


def scenes(n: int, start: int = 0) -> list[Scene]:
    return [scene.compose(np.random.Generator(np.random.PCG64(start + i))) for i in range(n)]


def named(drawn: Scene, color: str | None = None, shape: str | None = None) -> list[Thing]:
    return [t for t in drawn.things if color in (None, t.color) and shape in (None, t.shape)]


def answer_anew(drawn: Scene, text: str) -> str:
    """The answer, read from the words of the question and the list of objects alone."""
    if match := re.fullmatch(rf"is there an? ({ADJECTIVE}) ({NOUN})\?", text):
        return "yes" if named(drawn, *match.groups()) else "no"
    if match := re.fullmatch(rf"what color is the ({NOUN})\?", text):
        (thing,) = named(drawn, shape=match[1])
        return thing.color
    if match := re.fullmatch(rf"what shape is the ({ADJECTIVE}) object\?", text):
        (thing,) = named(drawn, color=match[1])
        return thing.shape
    if match := re.fullmatch(rf"which thing has the color of the ({NOUN})\?", text):
        (thing,) = named(drawn, shape=match[1])
        return questions.COLOR_FACTS[thing.color]
    if match := re.fullmatch(rf"which word goes with the ({ADJECTIVE}) object\?", text):
        (thing,) = named(drawn, color=match[1])
        return questions.SHAPE_FACTS[thing.shape]
    if match := re.fullmatch(
        rf"is the ({ADJECTIVE}) ({NOUN}) (left of|right of|above|below) the ({ADJECTIVE}) ({NOUN})\?", text
    ):
        (first,), (second,) = named(drawn, match[1], match[2]), named(drawn, match[4], match[5])
        holds = {
            "left of": first.x < second.x,
            "right of": first.x > second.x,
            "above": first.y < second.y,
            "below": first.y > second.y,
        }[match[3]]
        return "yes" if holds else "no"
    if match := re.fullmatch(r"how many objects are (\w+)\?", text):
        word = match[1]
        if word in scene.COLORS:
            return str(len(named(drawn, color=word)))
        singular = {"crosses": "cross"}.get(word, word.removesuffix("s"))
        return str(len(named(drawn, shape=singular)))
    if match := re.fullmatch(rf"which cell holds the ({ADJECTIVE}) ({NOUN})\?", text):
        (thing,) = named(drawn, *match.groups())
        side = CANVAS / 6
        return "abcdef"[int(thing.x / side)] + str(1 + int(thing.y / side))
    if match := re.fullmatch(rf"where is the ({ADJECTIVE}) ({NOUN})\?", text):
        (thing,) = named(drawn, *match.groups())
        return f"{'top' if thing.y < CANVAS / 2 else 'bottom'} {'left' if thing.x < CANVAS / 2 else 'right'}"
    assert text == "what number is on the plate?"
    assert drawn.plate is not None
    return drawn.plate.digits


@pytest.mark.parametrize("family", questions.ALL_FAMILIES)
def test_answers_follow_from_the_objects(family: str) -> None:
    asked = 0
    for i, drawn in enumerate(scenes(60)):
        rng = np.random.Generator(np.random.PCG64(i))
        for want in (None, i):
            question = questions.ask(drawn, family, rng, want)
            if question is not None:
                asked += 1
                assert question.family == family
                assert question.answer == answer_anew(drawn, question.text)
                assert question.answer in question.choices
                assert len(set(question.choices)) == len(question.choices)
    assert asked > 40


def test_places_are_asked_only_where_they_are_named_and_are_balanced() -> None:
    assert "place" not in {sample.family for sample in load_task("shapes", n=16)}
    answers = [sample.answer for sample in load_task("shapes", n=8, families=["place"])]
    assert sorted(answers) == sorted(questions.QUARTERS * 2)


def test_referents_are_the_objects_in_question() -> None:
    for i, drawn in enumerate(scenes(40)):
        rng = np.random.Generator(np.random.PCG64(i))
        counted = questions.ask(drawn, "count", rng)
        assert counted is not None
        assert len(counted.referents) == int(counted.answer)
        related = questions.ask(drawn, "relation", rng)
        if related is not None:
            first, second = (drawn.things[number - 1].name for number in related.referents)
            assert re.search(rf"the {first} .* the {second}\?", related.text)


def test_the_index_map_agrees_with_an_independent_drawing() -> None:
    """Every object drawn alone, with a plain circle test for its disc, covers exactly the pixels the map gives it."""
    for drawn in scenes(12):
        for number, thing in enumerate(drawn.things, start=1):
            alone = Image.new("1", (CANVAS, CANVAS))
            pen = ImageDraw.Draw(alone)
            pen.polygon(drawing.outline(thing), fill=1)
            if thing.shape == "ring":
                pen.polygon(drawing.outline(thing, drawing.RING_HOLE), fill=0)
            assert np.array_equal(np.asarray(alone), drawn.index == number)
            rows, columns = np.nonzero(drawn.index == number)
            assert (np.hypot(columns - thing.x, rows - thing.y) <= thing.radius + 1.5).all()


def test_pixels_show_the_color_of_the_map_and_ground_is_grey() -> None:
    for drawn in scenes(12):
        pixels = np.asarray(drawn.image).astype(int)
        for number, thing in enumerate(drawn.things, start=1):
            shown = pixels[drawn.index == number]
            assert len(np.unique(shown, axis=0)) == 1
            assert np.abs(shown[0] - np.array(drawing.COLORS[thing.color])).max() <= drawing.COLOR_JITTER
            nearest = min(drawing.COLORS, key=lambda c: np.abs(shown[0] - np.array(drawing.COLORS[c])).sum())
            assert nearest == thing.color
        ground = pixels[drawn.index == 0]
        assert (ground.max(axis=1) - ground.min(axis=1)).max() <= 60


def test_boxes_and_foreground_agree_with_the_map() -> None:
    for sample in load_task("shapes", n=14, seed=3):
        assert sample.foreground is not None
        assert sample.foreground.shape == (CANVAS, CANVAS)
        assert sample.foreground.dtype == bool
        for x0, y0, x1, y1 in sample.boxes:
            part = sample.foreground[int(y0) : int(y1), int(x0) : int(x1)]
            assert part[0].any() and part[-1].any() and part[:, 0].any() and part[:, -1].any()


def test_foreground_is_20_to_40_percent_of_the_tokens() -> None:
    covered = [(drawn.index > 0).reshape(24, 14, 24, 14).mean(axis=(1, 3)) >= 0.15 for drawn in scenes(80)]
    shares = [one.mean() for one in covered]
    assert 0.25 < np.mean(shares) < 0.35
    assert np.quantile(shares, 0.1) > 0.2
    assert np.quantile(shares, 0.9) < 0.4


def test_the_same_seed_gives_the_same_bytes() -> None:
    def digest(seed: int) -> str:
        found = hashlib.sha256()
        for sample in load_task("shapes", n=7, seed=seed):
            found.update(sample.image.tobytes() + sample.question.encode() + sample.answer.encode())
            found.update(np.asarray(sample.foreground).tobytes() + repr(sample.boxes).encode())
        return found.hexdigest()

    assert digest(0) == digest(0)
    assert digest(0) != digest(1)


def test_a_sample_does_not_depend_on_the_size_of_its_task() -> None:
    small, large = load_task("shapes", n=3, seed=5), load_task("shapes", n=300, seed=5)
    assert small[2].question == large[2].question
    assert small[2].image.tobytes() == large[2].image.tobytes()


def test_answers_are_balanced() -> None:
    for family, ways in (("exist", 2), ("relation", 2), ("count", 4)):
        answers = Counter(sample.answer for sample in load_task("shapes", n=40, seed=2, families=[family]))
        assert set(answers.values()) == {40 // ways}, family
    answers = Counter(sample.answer for sample in load_task("shapes", n=96, seed=2, families=["attribute"]))
    assert len(answers) == 16
    assert max(answers.values()) < 16


def test_families_take_turns_and_pictures_are_shared_on_demand() -> None:
    task = load_task("shapes", n=14, seed=0)
    assert [sample.family for sample in task] == list(questions.FAMILIES) * 2
    assert len({sample.image_id for sample in task}) == 14
    shared = list(load_task("shapes", n=14, seed=0, questions_per_image=7))
    assert len({sample.image_id for sample in shared}) == 2
    assert len({sample.id for sample in shared}) == 14
    assert shared[0].image.tobytes() == shared[6].image.tobytes()


def test_no_place_is_preferred() -> None:
    """Mirroring leaves the distribution of foreground unchanged: halves hold equal parts, within sampling error.

    Objects may be cut by the border by a part of their radius, so border tokens see objects too, if fewer than others.
    """
    things = [(t.x, t.y, t.radius) for drawn in scenes(100) for t in drawn.things]
    xs, ys, radii = np.array(things).T
    for values in (xs, ys):
        error = CANVAS / np.sqrt(12 * len(values))
        assert abs(values.mean() - CANVAS / 2) < 4 * error
    reach = (CANVAS / 2 - (1 - scene.OVERHANG) * radii) / (CANVAS / 2)
    assert np.abs((xs - CANVAS / 2) / (CANVAS / 2) / reach).max() <= 1
    covered = np.mean([drawn.index > 0 for drawn in scenes(100)], axis=0)
    for flipped in (covered[::-1], covered[:, ::-1]):
        top, bottom = covered[: CANVAS // 2].mean(), flipped[: CANVAS // 2].mean()
        assert abs(top - bottom) < 0.03
    border = np.concatenate(
        [covered[:14].ravel(), covered[-14:].ravel(), covered[:, :14].ravel(), covered[:, -14:].ravel()]
    )
    assert border.mean() > 0.2 * covered.mean()


def test_mirrored_objects_are_objects_of_the_world() -> None:
    """A mirrored outline is the outline of the thing with its place, its turn and its flip mirrored."""
    for drawn in scenes(5):
        for t in drawn.things:
            mirrored = Thing(t.shape, t.color, CANVAS - t.x, t.y, t.radius, t.turn, (not t.flips[0], t.flips[1]))
            expected = [(CANVAS - x, y) for x, y in drawing.outline(t)]
            assert np.allclose(drawing.outline(mirrored), expected)
            assert abs(mirrored.turn) <= scene.TURN


@pytest.mark.parametrize("digit", "0123456789")
def test_digits_differ_from_each_other(digit: str) -> None:
    def drawn(figure: str) -> np.ndarray:
        picture = Image.new("RGB", (90, 70))
        drawing.paint_plate(picture, scene.Plate(figure * 2, 3, 3, 20, False))
        return np.asarray(picture)[..., 0] > 128

    for other in "0123456789":
        if other != digit:
            assert (drawn(digit) != drawn(other)).sum() > 60


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"name": "shpaes"}, "'shapes'"),
        ({"name": "shapes", "families": ["cuont"]}, "'count'"),
        ({"name": "shapes", "families": []}, "empty"),
        ({"name": "shapes", "n": 0}, "n=0"),
        ({"name": "shapes", "n": 1.5}, "n=1.5: give a whole number"),
        ({"name": "shapes", "seed": "a"}, "seed='a'"),
        ({"name": "shapes", "seed": -1}, "seed is -1"),
        ({"name": "shapes", "questions_per_image": 0}, "questions_per_image=0"),
    ],
)
def test_wrong_input_is_one_helpful_line(arguments: dict, part: str) -> None:
    with pytest.raises(DartLabError) as caught:
        load_task(**arguments)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
