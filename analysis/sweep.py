"""What the figures about accuracy share: options with defaults, a model, questions, records, provenance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dart_lab.displays.figure import FigureOptions
from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.fitting import Depth
from dart_lab.studies.answering import answer_all
from dart_lab.tasks.base import Sample, Task

DATA = "shapes"


@dataclass(frozen=True, eq=False)
class Bench:
    """A model and the questions that a figure is about."""

    options: FigureOptions
    vlm: Any
    task: Task
    depth: Depth

    def answers(self, conditions: Mapping[str, Pruner | None], progress: bool) -> pd.DataFrame:
        """Records of every condition."""
        return answer_all(self.vlm, self.task, conditions, batch_size=self.options.batch_size, progress=progress)

    def facts(self, name: str) -> dict[str, Any]:
        """Command, model, task and provenance, as every figure notes them."""
        o = self.options
        keep = "" if not o.keep else f" --keep {','.join(map(str, o.keep))}"
        methods = "" if not o.methods else f" --methods {','.join(o.methods)}"
        book = "" if o.rolebook is None else f" --rolebook {o.rolebook}"
        rules = "" if not o.rules else " --rules " + ",".join(f"{role}={rule}" for role, rule in o.rules.items())
        return {
            "command": f"dart-lab figure {name} --model {o.model} --data {o.data}{methods}{keep} --layer {o.layer} "
            f"--n {o.n} --seed {o.seed}{book}{rules}",
            "model": o.model, "data": self.task.name, "n": len(self.task), "layer": o.layer, "seed": o.seed,
            "visual": self.depth.visual, "task": self.task.provenance(), "provenance": self.vlm.provenance(),
        }  # fmt: skip


def open_bench(
    options: FigureOptions,
    *,
    n: int,
    keep: Sequence[int] = (),
    methods: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
) -> Bench:
    """Fill in defaults, check what can be checked, and load.

    Args:
        options: of the figure.
        n: default number of questions.
        keep: default budgets, in visual tokens.
        methods: default methods.
        families: kinds of questions of the drawn world. Default: all, for `mini` those it was taught.

    Raises:
        DartLabError: an unknown model or task, ratios in place of whole numbers, fewer than two questions.
    """
    from dart_lab.tasks import load_task
    from dart_lab.vlm.load import MINI, check_model_name, load

    options = dataclasses.replace(
        options, n=n if options.n is None else options.n, keep=options.keep or tuple(keep) or None,
        data=options.data or DATA, methods=options.methods or (None if methods is None else tuple(methods)),
    )  # fmt: skip
    if any(not isinstance(each, int) for each in options.keep or ()):
        raise DartLabError("this figure compares whole numbers of visual tokens; give --keep 128,64")
    if (options.n or 0) < 2:
        raise DartLabError(f"n={options.n}: an interval needs two questions at least")
    check_model_name(options.model)
    if families is None and options.model == MINI:
        from dart_lab.mini.data import FAMILIES

        families = FAMILIES
    own = families if options.data == DATA else None
    task = load_task(options.data or DATA, n=options.n, seed=options.seed, families=own)
    vlm = load(options.model)
    depth = Depth(layers=vlm.depth, blocks=vlm.feature_blocks, visual=visual_tokens(vlm, task[0]))
    return Bench(options, vlm, task, depth)


def runnable(bench: Bench, wanted: Mapping[str, Callable[[], Pruner]]) -> tuple[dict[str, Pruner], dict[str, str]]:
    """The methods that can be built and run on this model, and why the others cannot."""
    found: dict[str, Pruner] = {}
    refused: dict[str, str] = {}
    for label, build in wanted.items():
        try:
            pruner = build()
            answer_all(bench.vlm, [bench.task[0]], {label: pruner}, max_new_tokens=1)
            found[label] = pruner
        except DartLabError as error:
            refused[label] = str(error)
    return found, refused


def visual_tokens(vlm: Any, sample: Sample) -> int:
    """Visual tokens of one picture."""
    from dart_lab.vlm.locate import layout

    return len(layout(vlm, vlm.prepare([sample.image], [sample.question])).samples[0])


def interval(row: Any) -> dict[str, float]:
    """Value and interval of a row of a score table, as plain numbers."""
    return {name: float(row[name]) for name in ("value", "low", "high")}


def points(gap: Mapping[str, float]) -> str:
    """A paired difference with its interval, in points."""
    return f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"
