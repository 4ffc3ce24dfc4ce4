"""Questions with answers about pictures: what a sample is, and how a task is loaded by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image

from dart_lab.errors import DartLabError, check_whole, did_you_mean

Box = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Sample:
    """One question about one picture.

    Attributes:
        id: name of the sample, unique within its task.
        image: the picture, RGB.
        question: the question as a user would type it.
        answer: the right answer; empty where it is not known.
        family: kind of question; scores are given for every family.
        choices: the closed set that the answer is from, in a fixed order; empty for open questions.
        boxes: boxes ``(x0, y0, x1, y1)`` in pixels, ends excluded, of what the question asks about.
        foreground: ``(height, width)`` bool, every pixel of an object; None where it is not known.
        image_id: name of the picture; samples about the same picture share it.
    """

    id: str
    image: Image.Image
    question: str
    answer: str
    family: str
    choices: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    foreground: np.ndarray | None = None
    image_id: str = ""


@dataclass(frozen=True, eq=False)
class Task(Sequence[Sample]):
    """A sized sequence of samples that can be gone through again and again; samples are made when they are asked for.

    Attributes:
        name: name of the task.
        size: number of samples.
        make: the sample of every index from 0 to ``size - 1``; the same index gives the same sample.
        details: what was asked for, so that the samples can be made again.

    >>> task = load_task("shapes", n=7, seed=0)
    >>> len(task), task[0].family, task[-1].family
    (7, 'exist', 'knowledge')
    """

    name: str
    size: int
    make: Callable[[int], Sample] = field(repr=False)
    details: dict[str, Any]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(f"sample {index} of a task of {self.size}")
        return self.make(index % self.size)

    def __iter__(self) -> Iterator[Sample]:
        return (self.make(i) for i in range(self.size))

    def provenance(self) -> dict[str, Any]:
        """Name, size and what was asked for: enough to make the same samples again; plain values only."""
        return {"task": self.name, "n": self.size, **self.details}


def _shapes(n: int, seed: int, families: Sequence[str] | None, questions_per_image: int) -> Task:
    from dart_lab.tasks.shapes import shapes_task

    return shapes_task(n=n, seed=seed, families=families, questions_per_image=questions_per_image)


TASKS: dict[str, Callable[[int, int, Sequence[str] | None, int], Task]] = {"shapes": _shapes}


def check_families(families: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """The chosen families, by default all.

    Raises:
        DartLabError: a family is unknown, or none is left.
    """
    if families is None:
        return tuple(known)
    chosen = [families] if isinstance(families, str) else list(families)
    for family in chosen:
        if family not in known:
            raise DartLabError(f"Unknown family {family!r}. {did_you_mean(str(family), known)}")
    if not chosen:
        raise DartLabError(f"families is empty: give one or more of {', '.join(known)}, or None for all")
    return tuple(dict.fromkeys(chosen))


def load_task(
    name: str | Path,
    *,
    n: int | None = None,
    seed: int = 0,
    families: Sequence[str] | None = None,
    questions_per_image: int = 1,
) -> Task:
    """Load a task by its name, or a folder of pictures with a ``questions.csv`` or ``questions.jsonl``.

    Args:
        name: ``"shapes"``, the drawn world, or the path of a folder.
        n: number of samples; by default 200 for the drawn world and all of a folder.
        seed: seed of the drawn pictures, and of the choice of samples from a folder with more than ``n``.
        families: kinds of questions to keep; by default all.
        questions_per_image: questions about every drawn picture.

    Raises:
        DartLabError: the name is neither a task nor a folder, or the folder's questions cannot be used.

    >>> load_task("shapes", n=2).provenance()["families"][:2]
    ['exist', 'attribute']
    """
    if n is not None:
        check_whole("n", n, least=1)
    check_whole("seed", seed)
    check_whole("questions_per_image", questions_per_image, least=1)
    if str(name) in TASKS:
        return TASKS[str(name)](200 if n is None else n, seed, families, questions_per_image)
    folder = Path(name)
    if folder.is_dir():
        from dart_lab.tasks.folder import folder_task

        return folder_task(folder, n=n, seed=seed, families=families)
    if folder.exists() or len(folder.parts) > 1:
        raise DartLabError(f"{name} is not a folder: give a folder of pictures with questions.csv or questions.jsonl")
    raise DartLabError(f"Unknown task {str(name)!r}. {did_you_mean(str(name), TASKS)} Or give a folder of pictures.")
