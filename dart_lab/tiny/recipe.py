"""The recipe of ``tiny``: windows of the canvas grow from 12 by 12 patches to the whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from dart_lab.tiny.vision import Shape


@dataclass(frozen=True)
class Phase:
    """A stretch of training on one window size.

    ``images`` and ``steps`` count pictures a rank and updates; the learning rate goes linearly from ``lr`` to
    ``lr_end``. Without ``questions`` only the vision tower is trained. ``shares`` are the families' shares of the
    questions, in the order of ``FAMILIES``; ``count`` and ``referent`` weigh the losses that teach where to look.
    """

    grid: int
    images: int
    questions: int
    steps: int
    lr: float
    lr_end: float
    shares: tuple[float, ...] = (2.0, 1.5, 2.0, 2.5, 2.0, 1.2, 1.2)
    count: float = 0.4
    referent: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """All that shapes a training run but its seed.

    ``blocked`` is the share of
    pictures whose text does not see visual tokens in the first ``late_from`` layers, so that answers are read after
    them. ``thinned`` is the share of updates in which a random part of the ground is dropped from there on.
    """

    phases: tuple[Phase, ...]
    shape: Shape = field(default_factory=Shape)
    ranks: int = 2
    warmup: int = 40
    weight_decay: float = 0.02
    clip: float = 1.0
    blocked: float = 0.7
    late_from: int = 2
    thinned: float = 0.25


HARDER = (1.5, 1.2, 3.0, 3.5, 1.5, 1.0, 1.0)  # shares with more relations and counting
TINY = Recipe(
    phases=(
        Phase(grid=12, images=16, questions=0, steps=850, lr=4e-3, lr_end=1.5e-3),
        Phase(grid=12, images=8, questions=12, steps=520, lr=2.5e-3, lr_end=2.2e-3),
        Phase(grid=16, images=6, questions=14, steps=640, lr=2.2e-3, lr_end=1.7e-3),
        Phase(grid=24, images=4, questions=16, steps=900, lr=1.7e-3, lr_end=1e-5),
        Phase(
            grid=16, images=6, questions=14, steps=240, lr=1.5e-3, lr_end=1.3e-3, shares=HARDER, count=1.0, referent=0.4
        ),
        Phase(
            grid=24, images=4, questions=16, steps=500, lr=1.3e-3, lr_end=1e-5, shares=HARDER, count=1.0, referent=0.4
        ),
    )
)
