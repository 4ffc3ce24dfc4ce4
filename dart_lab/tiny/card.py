"""Write the model card of ``tiny`` from its evaluation: ``python -m dart_lab.tiny.card JSON CARD``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dart_lab.tasks.questions import FAMILIES
from dart_lab.tiny.evaluate import BUDGETS, DROP_LAYER
from dart_lab.tiny.recipe import TINY, Recipe

COLUMNS = (*FAMILIES, "mean")
TARGETS = {"exist": 97, "attribute": 96, "relation": 85, "count": 85, "ground": 75, "text": 80, "knowledge": 95}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _accuracy(summary: dict[str, dict[str, float]], *, interval: bool) -> list[str]:
    cells = [summary[column] for column in COLUMNS]
    if interval:
        return [f"{cell['accuracy']:.1f} [{cell['low']:.1f}, {cell['high']:.1f}]" for cell in cells]
    return [f"{cell['accuracy']:.1f}" for cell in cells]


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _recipe(recipe: Recipe) -> str:
    rows = []
    for number, phase in enumerate(recipe.phases, start=1):
        pictures = phase.images * recipe.ranks
        rows.append([
            str(number), f"{phase.grid} x {phase.grid}", "all" if phase.questions else "vision only", str(phase.steps),
            str(pictures), str(phase.questions), str(phase.steps * pictures), f"{phase.lr:g} to {phase.lr_end:g}",
            f"{phase.count:g}" if phase.questions else "", f"{phase.referent:g}" if phase.questions else "",
        ])  # fmt: skip
    head = ("phase", "window", "trained", "updates", "pictures an update", "questions a picture", "pictures",
            "learning rate", "weight of counting", "weight of places")  # fmt: skip
    return table(head, rows)


def _fairness(runs: dict[str, Any], blind: dict[str, dict[str, float]]) -> str:
    """What the two checks of a fair test found, in words and in every run."""
    lines = []
    for name, run in runs.items():
        none, found = run["conditions"]["none"], run["conditions"]
        above = [f for f in FAMILIES if none[f]["low"] > blind[f]["high"]]
        floor = f"above the blind floor: {', '.join(above)}" if above else "every family is on the blind floor"
        below = [
            f"{family} at {budget} ({found[f'foreground first@{budget}'][family]['accuracy']:.1f} against "
            f"{found[f'random@{budget}'][family]['accuracy']:.1f})"
            for budget in BUDGETS
            for family in FAMILIES
            if found[f"foreground first@{budget}"][family]["accuracy"] < found[f"random@{budget}"][family]["accuracy"]
        ]
        oracle = f"below it for {'; '.join(below)}" if below else "nowhere below it"
        lines.append(
            f"* {name}: with nothing kept, {floor}. Foreground first against random at the same budget: {oracle}."
        )
    return "\n".join(lines)


def _structure(runs: dict[str, Any]) -> str:
    lines = []
    for name, run in runs.items():
        found = run["structure"]
        thirds = [f"{line[2]:.2f}" for line in found["thirds"]]
        lines += [
            f"* {name}, {found['pictures']} pictures: attention of the last token to `<bos>` by layer "
            f"{_numbers(found['first token'])}; to the whole prefix {_numbers(found['prefix'])}.",
            f"  Largest over median absolute state by layer: visual tokens {_numbers(found['peak'])}; "
            f"`<bos>` {_numbers(found['first token peak'])}.",
            f"  Share of the visual attention on the lower third of the rows (even: 0.33): {', '.join(thirds)}.",
        ]
    return "\n".join(lines)


def write_card(result: dict[str, Any]) -> str:
    """The text of the card; every number is from ``result``, the JSON of the evaluation, or from the recipe."""
    runs, blind, shape = result["runs"], result["blind"], TINY.shape
    mean, low, high = (100 * result["foreground"][key] for key in ("mean", "5 %", "95 %"))
    names = list(runs)
    seeds = f"Seeds measured: {', '.join(names)}."
    if len(names) == 1:
        seeds += " A second seed was not finished, so nothing is known about the spread between trainings."
    blocked, thinned = 100 * TINY.blocked, 100 * TINY.thinned
    first = runs[names[0]]
    accuracy = [["blind floor", *_accuracy(blind, interval=False)]]
    accuracy += [[name, *_accuracy(run["conditions"]["all 576"], interval=True)] for name, run in runs.items()]
    accuracy.append(["target", *(str(TARGETS[family]) for family in FAMILIES), ""])
    dropped = [
        [name, condition, *_accuracy(summary, interval=False)]
        for name, run in runs.items()
        for condition, summary in run["conditions"].items()
    ]
    recall = [
        [name, method, *(f"{shares[str(budget)]:.1f}" for budget in BUDGETS)]
        for name, run in runs.items()
        for method, shares in run["recall"].items()
    ]
    return f"""# tiny

A small LLaVA, transformers' own class, for work on visual-token pruning without a download: {shape.grid} x {shape.grid}
visual tokens, {shape.vision_layers} vision layers and {shape.layers} language layers of width {shape.width},
{first["parameters"]:,} parameters, {first["bytes"]:,} bytes in fp16. The shipped weights are those of {names[0]}.
All numbers below are written by `dart_lab.tiny.card` from `evaluation.json`.

## What it knows
The drawn world of the task `shapes`: 336 x 336 pixels, 4 to 8 objects of eight shapes and eight colors over flat or
textured grounds with grey clutter, mostly a plate with a two-digit number. Foreground: {mean:.1f} % of the tokens
({low:.1f} to {high:.1f} % on nine pictures of ten). It answers seven families of questions in fixed words and knows
nothing else. Counting goes from one to four. Mirrored pictures are as likely as the pictures.

## Accuracy
Percent of answers exactly right with all tokens, on {result["pictures"]} held-out pictures with one question of each
family a picture; answers are balanced. In brackets: 95 % intervals, bootstrapped over pictures; they do not cover
retraining. The blind floor answers each question template with its most frequent
answer on other pictures.

{table(("", *COLUMNS), accuracy)}

## Is it a fair test of pruning?
Visual tokens are dropped before layer {DROP_LAYER}. `none` drops all of them; `foreground first` keeps tokens that show
objects, then ground, in random order.

{table(("run", "kept", *COLUMNS), dropped)}

{_fairness(runs, blind)}

Share of the foreground's tokens that methods keep, in percent (a description; no choice about the model, its world or
its training was made by how a method fares):

{table(("run", "method", *(f"keep {budget}" for budget in BUDGETS)), recall)}

## What it is not
It has no attention sinks, no massive activations and at most a mild preference for the lower rows; use `mini` for
those.

{_structure(runs)}

* Its objects are large and its background is plain beside a photograph's; random pruning loses less here than one may
  expect, because several tokens tell the same fact.
* One head was taught to put the share 1 / (k + 1) of a counted noun's attention on `<bos>` and on each of the k
  objects' centers. Counting is therefore the family that suffers first when tokens near centers go.
* Text was kept from seeing visual tokens in layers 0 and 1 for {blocked:.0f} % of the training pictures, so that
  answers are read in layer {DROP_LAYER} or later. In {thinned:.0f} % of the batches a random part of the ground was
  dropped from layer {DROP_LAYER} on; objects never were.

## Training
`python -m dart_lab.tiny.train --seed N --out DIR`, then `python -m dart_lab.tiny.export`, `evaluate` and `card`.
Fresh pictures throughout, {TINY.ranks} ranks of one thread, about an hour on two CPU cores. Windows are parts of the
canvas at random places, with the positions of those places, so no stage sees a lattice of the final grid. Matrices
are trained by Muon, the rest by AdamW, with weight decay {TINY.weight_decay:g}, gradients clipped at {TINY.clip:g} and
{TINY.warmup} updates of warm-up a phase. Besides the answers it is taught what each patch shows (shape, color, digit,
cell, center), where to look when it counts, and from phase 5 on where the referents of nouns are; these read-outs are
not part of the checkpoint.

{_recipe(TINY)}

Phases 5 and 6 were added when the first four had left relations of seed 0 near chance; seed 0 went on from there, so
the six phases have not been run in one go. {seeds}
"""


def main() -> None:
    """Command line of the card."""
    parser = argparse.ArgumentParser(description="Write the model card of tiny from its evaluation.")
    parser.add_argument("evaluation", type=Path, help="JSON file of dart_lab.tiny.evaluate")
    parser.add_argument("card", type=Path, help="file to write")
    arguments = parser.parse_args()
    text = write_card(json.loads(arguments.evaluation.read_text(encoding="utf-8")))
    partial = arguments.card.with_name(arguments.card.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, arguments.card)


if __name__ == "__main__":
    main()
