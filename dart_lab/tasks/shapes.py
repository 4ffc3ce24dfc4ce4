"""The task ``shapes``: drawn scenes of 336 by 336 pixels and balanced questions, the same for a seed everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dart_lab.errors import DartLabError
from dart_lab.tasks.base import Sample, Task, check_families
from dart_lab.tasks.questions import ALL_FAMILIES, FAMILIES, Question, ask
from dart_lab.tasks.scene import COUNTS, Scene, compose

STREAM = 1_009  # keeps the task's pictures apart from other drawings with the same seed
REDRAWS = 1_000  # pictures tried until one has the wanted question


def _draw(seed: int, picture: int, families: Sequence[str], numbers: Sequence[int]) -> tuple[Scene, list[Question]]:
    """The first picture of a fixed row of pictures that has a question of every wanted family."""
    for redraw in range(REDRAWS):
        entropy = np.random.SeedSequence((STREAM, seed, picture, redraw))
        rng = np.random.Generator(np.random.PCG64(entropy))
        count = next(
            (COUNTS[n % len(COUNTS)] for family, n in zip(families, numbers, strict=True) if family == "count"), None
        )
        scene = compose(rng, count=count, plate=True if "text" in families else None)
        asked = [ask(scene, family, rng, want=number) for family, number in zip(families, numbers, strict=True)]
        found = [question for question in asked if question is not None]
        if len(found) == len(families) and len({question.text for question in found}) == len(found):
            return scene, found
    raise DartLabError(
        f"no picture has {len(families)} different questions of the families {', '.join(sorted(set(families)))}"
    )


def shapes_task(
    *, n: int = 200, seed: int = 0, families: Sequence[str] | None = None, questions_per_image: int = 1
) -> Task:
    """The drawn world as a task: families in rotation, answers and templates balanced within each.

    Args:
        n: number of questions.
        seed: 0 or more; other seeds give other pictures.
        families: kinds of questions from ``ALL_FAMILIES``, by default ``FAMILIES``.
        questions_per_image: number of different questions about every picture, by default one.

    Raises:
        DartLabError: a family is unknown or the seed is negative.

    >>> shapes_task(n=3, seed=1, families=["count"])[2].answer
    '3'
    """
    chosen = FAMILIES if families is None else check_families(families, ALL_FAMILIES)
    if seed < 0:
        raise DartLabError(f"seed is {seed}: give 0 or more")

    def make(index: int) -> Sample:
        picture = index // questions_per_image
        asked = range(picture * questions_per_image, (picture + 1) * questions_per_image)
        scene, questions = _draw(
            seed, picture, [chosen[i % len(chosen)] for i in asked], [i // len(chosen) for i in asked]
        )
        question = questions[index % questions_per_image]
        name = f"shapes-{seed}-{picture}"
        return Sample(
            id=f"{name}-{index % questions_per_image}",
            image=scene.image,
            question=question.text,
            answer=question.answer,
            family=question.family,
            choices=question.choices,
            boxes=tuple(scene.box(number) for number in question.referents),
            foreground=scene.index > 0,
            image_id=name,
        )

    details = {"seed": seed, "families": list(chosen), "questions_per_image": questions_per_image}
    return Task("shapes", n, make, details)
