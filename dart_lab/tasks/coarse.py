"""Down-sampled pictures: the baseline that many pruning methods do not beat."""

from __future__ import annotations

import dataclasses

from PIL import Image

from dart_lab.errors import DartLabError
from dart_lab.tasks.base import Sample, Task


def coarse_picture(picture: Image.Image, *, share: float) -> Image.Image:
    """Shrink a picture to a share of its pixels and blow it up again: the same size, less detail.

    A model with a fixed number of visual tokens then sees as many tokens, which hold no more than `share` of them
    could; a model whose number of tokens follows the resolution can be given the small picture itself (`blow_up=False`
    of `coarse`).

    Args:
        picture: any size.
        share: of the pixels, in (0, 1]; 64 / 576 leaves what 64 of 576 patches hold.

    Raises:
        DartLabError: a share outside (0, 1].

    >>> coarse_picture(Image.new("RGB", (48, 24)), share=0.25).size
    (48, 24)
    """
    return shrunk(picture, share=share).resize(picture.size, Image.Resampling.BICUBIC)


def shrunk(picture: Image.Image, *, share: float) -> Image.Image:
    """A picture with a share of the pixels, its proportions kept to a pixel, at least 1 × 1.

    >>> shrunk(Image.new("RGB", (48, 24)), share=0.25).size
    (24, 12)
    """
    if not 0 < share <= 1:
        raise DartLabError(f"share={share!r}: give the share of the pixels to keep, above 0 and at most 1")
    side = share**0.5
    return picture.resize(tuple(max(1, round(length * side)) for length in picture.size), Image.Resampling.BICUBIC)


def coarse(task: Task, *, share: float, blow_up: bool = True) -> Task:
    """The same task on down-sampled pictures.

    Args:
        task: any task.
        share: of the pixels, in (0, 1].
        blow_up: give the pictures their old size back. Default True. Without it, boxes and foreground are left out,
            since they are in pixels of the old size.

    Raises:
        DartLabError: a share outside (0, 1].

    >>> from dart_lab.tasks import load_task
    >>> coarse(load_task("shapes", n=2, seed=0), share=0.25)[0].image.size
    (336, 336)
    """
    if not 0 < share <= 1:
        raise DartLabError(f"share={share!r}: give the share of the pixels to keep, above 0 and at most 1")

    def make(index: int) -> Sample:
        sample = task.make(index)
        if blow_up:
            return dataclasses.replace(sample, image=coarse_picture(sample.image, share=share))
        return dataclasses.replace(sample, image=shrunk(sample.image, share=share), boxes=(), foreground=None)

    return Task(task.name, task.size, make, {**task.details, "coarse": {"share": share, "blow_up": blow_up}})
