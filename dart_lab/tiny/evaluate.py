"""How good ``tiny`` is, and whether it tests pruning fairly: ``python -m dart_lab.tiny.evaluate RUN... --out JSON``.

A run is an exported checkpoint. An answer counts when greedy decoding would give it exactly. Visual tokens that a
condition drops are dropped from layer ``DROP_LAYER`` on. Intervals are bootstrapped over pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dart_lab.tasks import Sample, load_task, scene
from dart_lab.tasks.questions import FAMILIES, PLURALS, Question
from dart_lab.tiny import data, words
from dart_lab.tiny.network import Rows, Text, TinyNetwork
from dart_lab.tiny.recall import foreground_recall
from dart_lab.tiny.recipe import TINY

DROP_LAYER = 2
BUDGETS = (192, 128, 64)
PICTURES, BLIND_PICTURES, STRUCTURE_PICTURES, RECALL_PICTURES = 300, 400, 16, 28
TASK_SEED, BLIND_SEED = 90_001, 90_002  # no training stream and no other default uses them
BATCH = 10  # pictures
DRAWS, LEVEL = 2_000, 0.95  # of the bootstrap

Keep = Callable[[Tensor, np.random.Generator], Tensor]


@dataclass(frozen=True)
class Condition:
    """What stays: ``keep`` maps foreground (patches,) bool to kept (patches,) bool; None keeps all."""

    name: str
    keep: Keep | None


def load_network(folder: Path) -> TinyNetwork:
    """The network of an exported checkpoint, in float32."""
    network = TinyNetwork(TINY.shape, len(words.VOCABULARY), [words.IDS[word] for word in words.PREFIX])
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return network.eval()


def foreground_tokens(sample: Sample) -> Tensor:
    """(patches,) bool: patches of which at least ``COVERED`` shows objects.

    >>> int(foreground_tokens(load_task("shapes", n=1)[0]).numel())
    576
    """
    grid = scene.CANVAS // data.PATCH
    mask = np.asarray(sample.foreground).reshape(grid, data.PATCH, grid, data.PATCH)
    return torch.from_numpy(mask.mean(axis=(1, 3)).ravel() >= data.COVERED)


def _random(budget: int) -> Keep:
    def keep(foreground: Tensor, rng: np.random.Generator) -> Tensor:
        kept = torch.zeros_like(foreground)
        kept[torch.from_numpy(rng.permutation(len(foreground))[:budget])] = True
        return kept

    return keep


def _oracle(budget: int) -> Keep:
    """Foreground first, then ground, both in random order."""

    def keep(foreground: Tensor, rng: np.random.Generator) -> Tensor:
        order = np.argsort(rng.random(len(foreground)) + ~foreground.numpy())
        kept = torch.zeros_like(foreground)
        kept[torch.from_numpy(order[:budget])] = True
        return kept

    return keep


def conditions() -> list[Condition]:
    """All tokens, none, random ones and the foreground first, at every budget."""
    found = [Condition("all 576", None), Condition("none", lambda foreground, _: torch.zeros_like(foreground))]
    for budget in BUDGETS:
        found.append(Condition(f"random@{budget}", _random(budget)))
        found.append(Condition(f"foreground first@{budget}", _oracle(budget)))
    return found


def by_picture(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples grouped by their picture, in order."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.image_id, []).append(sample)
    return list(groups.values())


def pack_samples(groups: Sequence[Sequence[Sample]]) -> tuple[Text, Tensor, data.Spans]:
    """Packed questions of several pictures, their next tokens, and where the answers lie."""
    asked = [[Question(s.family, s.question, s.answer, s.choices, ()) for s in group] for group in groups]
    text, target, _, spans = data.pack(asked)
    return text, target, spans


@torch.inference_mode()
def right_answers(network: TinyNetwork, groups: Sequence[Sequence[Sample]], condition: Condition) -> list[list[bool]]:
    """For every picture and question, whether the answer is exactly right under a condition."""
    found: list[list[bool]] = []
    for start in range(0, len(groups), BATCH):
        part = groups[start : start + BATCH]
        origin = torch.zeros(len(part), 2, dtype=torch.int64)
        features, _ = network.look(data.normalise([np.asarray(group[0].image) for group in part]), origin, False)
        keep = None
        if condition.keep is not None:
            rngs = [np.random.Generator(np.random.PCG64((TASK_SEED, start + i))) for i in range(len(part))]
            keep = torch.stack(
                [condition.keep(foreground_tokens(group[0]), rng) for group, rng in zip(part, rngs, strict=True)]
            )
        text, target, spans = pack_samples(part)
        logits = network.answer(features, origin, text, late_from=DROP_LAYER, keep=keep).logits
        hit = logits.argmax(-1) == target
        found += [[bool(hit[i, at : at + n].all()) for _, at, n in line] for i, line in enumerate(spans)]
    return found


def template(question: str) -> str:
    """A question with its colors and shapes taken out.

    >>> template("is there a red circle?") == template("is there an orange arrow?")
    True
    """
    names = "|".join((*PLURALS.values(), *scene.SHAPES, *scene.COLORS))
    return re.sub(rf"\b({names})\b", "*", question).replace(" an ", " a ")


def blind_answers(groups: Sequence[Sequence[Sample]], families: Sequence[str] = FAMILIES) -> list[list[bool]]:
    """The best that is known without a picture: the most frequent answer of the same template on other pictures."""
    counts: dict[str, Counter[str]] = {}
    others = load_task(
        "shapes", n=len(families) * BLIND_PICTURES, seed=BLIND_SEED, families=families,
        questions_per_image=len(families),
    )  # fmt: skip
    for sample in others:
        counts.setdefault(template(sample.question), Counter())[sample.answer] += 1
    best = {key: min(count, key=lambda answer: (-count[answer], answer)) for key, count in counts.items()}
    return [[best.get(template(s.question)) == s.answer for s in group] for group in groups]


def summary(
    groups: Sequence[Sequence[Sample]], right: list[list[bool]], families: Sequence[str] = FAMILIES
) -> dict[str, dict[str, float]]:
    """Accuracy in percent with its interval for every family and for their unweighted mean.

    The bootstrap draws pictures with replacement.
    """
    own: list[dict[str, list[float]]] = [{family: [] for family in families} for _ in groups]
    for hits_of, group, hits in zip(own, groups, right, strict=True):
        for sample, hit in zip(group, hits, strict=True):
            hits_of[sample.family].append(100.0 * hit)
    table = np.array([[np.mean(hits_of[f]) if hits_of[f] else np.nan for f in families] for hits_of in own])
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = np.stack([np.nanmean(table[rng.integers(0, len(table), len(table))], axis=0) for _ in range(DRAWS)])
    drawn = np.column_stack([drawn, drawn.mean(axis=1)])
    means = np.append(np.nanmean(table, axis=0), np.nanmean(table, axis=0).mean())
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    names = (*families, "mean")
    return {
        name: {"accuracy": round(float(mean), 2), "low": round(float(a), 2), "high": round(float(b), 2)}
        for name, mean, a, b in zip(names, means, low, high, strict=True)
    }


@torch.inference_mode()
def structure(network: TinyNetwork, groups: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Sinks, massive activations and position bias, measured on the first question of every picture.

    ``prefix`` and ``first token`` are the mass that the last token's attention puts there, by layer, mean over heads;
    ``thirds`` its mass on the upper, middle and lower third of the picture's rows, as a share of the visual mass;
    ``peak`` is the largest over the median absolute state of visual tokens, ``first token peak`` that of ``<bos>``.
    """
    p, grid, layers = len(words.PREFIX), TINY.shape.grid, TINY.shape.layers
    firsts = [[group[0]] for group in groups]
    text, _, spans = pack_samples(firsts)
    origin = torch.zeros(len(firsts), 2, dtype=torch.int64)
    features, _ = network.look(data.normalise([np.asarray(group[0].image) for group in firsts]), origin, False)
    states: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
        for layer in network.language_model.model.layers
    ]
    try:
        network.answer(features, origin, text)
    finally:
        for hook in hooks:
            hook.remove()
    before = [state.abs() for state in states[:-1]]  # the last layer computes text only
    visual = [state[:, p : p + grid**2] for state in before]
    last = torch.tensor([line[0][1] for line in spans])
    mass = torch.zeros(layers, p + grid**2)
    for layer in range(layers):
        for head in range(TINY.shape.heads):
            rows = Rows(layer, head, torch.arange(len(firsts)), last)
            found = network.answer(features, origin, text, rows=rows).rows
            if found is not None:
                mass[layer] += found.exp()[:, : p + grid**2].mean(dim=0) / TINY.shape.heads
    thirds = mass[:, p:].view(layers, 3, -1).sum(dim=-1)
    return {
        "pictures": len(firsts),
        "first token": _rounded(mass[:, 0]),
        "prefix": _rounded(mass[:, :p].sum(dim=1)),
        "thirds": [_rounded(line) for line in thirds / thirds.sum(dim=1, keepdim=True)],
        "peak": _rounded(torch.stack([state.max() / state.median() for state in visual])),
        "first token peak": _rounded(torch.stack([state[:, 0].max() / state[:, 0].median() for state in before])),
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values]


def evaluate(folders: Sequence[Path], pictures: int = PICTURES) -> dict[str, Any]:
    """Everything that the model card states, for each exported checkpoint."""
    task = load_task("shapes", n=len(FAMILIES) * pictures, seed=TASK_SEED, questions_per_image=len(FAMILIES))
    groups = by_picture(list(task))
    shown = [foreground_tokens(group[0]) for group in groups[:RECALL_PICTURES]]
    covered = [float(foreground_tokens(group[0]).float().mean()) for group in groups]
    result: dict[str, Any] = {
        "task": task.provenance(),
        "pictures": len(groups),
        "foreground": {
            "mean": round(float(np.mean(covered)), 4),
            "5 %": round(float(np.quantile(covered, 0.05)), 4),
            "95 %": round(float(np.quantile(covered, 0.95)), 4),
        },
        "blind": summary(groups, blind_answers(groups)),
        "runs": {},
    }
    for folder in folders:
        network = load_network(folder)
        result["runs"][folder.name] = {
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "bytes": (folder / "model.safetensors").stat().st_size,
            "conditions": {c.name: summary(groups, right_answers(network, groups, c)) for c in conditions()},
            "structure": structure(network, groups[:STRUCTURE_PICTURES]),
            "recall": foreground_recall(
                folder, groups[:RECALL_PICTURES], [tokens.numpy() for tokens in shown], BUDGETS, DROP_LAYER
            ),
        }
    return result


def with_earlier_runs(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """Add the runs of an earlier result on the same pictures, so that seeds can be measured one after the other."""
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if (earlier["task"], earlier["pictures"]) == (result["task"], result["pictures"]):
            result["runs"] = dict(sorted({**earlier["runs"], **result["runs"]}.items()))
    return result


def main() -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(description="Measure exported checkpoints of tiny on held-out pictures.")
    parser.add_argument("folders", type=Path, nargs="+", help="exported checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, or to add to")
    parser.add_argument("--pictures", type=int, default=PICTURES, help=f"held-out pictures (default {PICTURES})")
    arguments = parser.parse_args()
    result = with_earlier_runs(evaluate(arguments.folders, arguments.pictures), arguments.out)
    partial = arguments.out.with_name(arguments.out.name + ".part")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, arguments.out)


if __name__ == "__main__":
    main()
