"""Batches, methods and comparisons that the tests of insertion share."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, Pruner, ScorePruner, Signals, make_pruner, pruner_names
from dart_lab.vlm.insert import prune
from dart_lab.vlm.masking import mask_drop
from dart_lab.vlm.run import Run
from tests.models import PATCH, SPECIAL, WORDS, llava_model
from tests.vlm.stepping import Steps, decode

GRID = 4
TOKENS = GRID * GRID  # visual tokens of one picture
IMAGE = SPECIAL.index("<image>")
NEVER = [IMAGE, SPECIAL.index("<eos>")]  # tokens that generation must not choose: it shall not stop early
ONE: tuple[int, ...] = (1,)
THREE: tuple[int, ...] = (1, 2, 1)  # pictures of each prompt; unequal numbers make unequal kept sets of a ratio


def small_llava(**sizes: Any) -> Any:
    """Four layers over 4 × 4 visual tokens a picture."""
    return llava_model(**{"grid": GRID, "layers": 4, **sizes})


def batch(images: Sequence[int] = ONE, *, seed: int = 0, answer: int = 0) -> dict[str, Tensor]:
    """Left-padded inputs: one prompt an entry, with that many pictures, text of unlike lengths around them.

    `answer` further text tokens follow each prompt. The same row comes out whatever the other rows are.
    """
    rows, pictures = [], []
    for number, count in enumerate(images):
        generator = torch.Generator().manual_seed(1000 * seed + 10 * number + count)
        row = [1, *words(generator, 2 + number)]
        for _ in range(count):
            row += [IMAGE] * TOKENS + words(generator, 2)
            pictures.append(torch.randn(3, GRID * PATCH, GRID * PATCH, generator=generator))
        rows.append([*row, *words(generator, 3 + 2 * number), *words(generator, answer)])
    return pad(rows, pictures)


def words(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(len(SPECIAL), len(SPECIAL) + len(WORDS), (count,), generator=generator).tolist()


def pad(rows: Sequence[Sequence[int]], pictures: Sequence[Tensor]) -> dict[str, Tensor]:
    """Left-pad and number the positions from each row's first real token, as `generate` does."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    return {**inputs, "pixel_values": torch.stack(list(pictures))} if len(pictures) else inputs


def alone(inputs: dict[str, Tensor], images: Sequence[int], row: int) -> dict[str, Tensor]:
    """One row of a batch as its own batch, its padding taken off."""
    real = inputs["attention_mask"][row].bool()
    first = sum(images[:row])
    out = {name: inputs[name][row : row + 1, real] for name in ("input_ids", "attention_mask", "position_ids")}
    return {**out, "pixel_values": inputs["pixel_values"][first : first + images[row]]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uneven(ScorePruner):
    """Keeps a number of tokens that is drawn for each sample: rows of a batch end up with unlike lengths."""

    name: ClassVar[str] = "uneven"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    def _needs_keep(self) -> bool:
        return False

    def asked(self, signals: Signals) -> Tensor:
        draws = [torch.rand(1, generator=signals.generator(i, self.seed)) for i in range(len(signals.counts))]
        return torch.stack([1 + (draw[0] * (n - 1)).long() for draw, n in zip(draws, signals.counts, strict=True)])

    def score(self, signals: Signals) -> Tensor:
        return signals.attention_to_visual(signals.last[:, None]).mean(dim=1)[:, 0]


def registered_methods(layer: int = 2) -> dict[str, Pruner]:
    """Every registered method that drops tokens before one decoder layer, keeping a quarter, under its name."""
    found = {}
    for name in pruner_names():
        try:
            pruner = make_pruner(name, keep=0.25, layer=layer)
        except DartLabError:  # it takes no keep, or acts elsewhere and takes no layer
            if name not in ("keep-all", "none-kept"):
                continue
            pruner = make_pruner(name, layer=layer)
        one_stage = pruner.stage.kind == "LLM_LAYER" and pruner.parts() == (pruner,) and pruner.positions == "original"
        if type(pruner).__module__.startswith("dart_lab.") and one_stage:
            found[name] = pruner
    return found


def all_methods(layer: int = 2) -> dict[str, Pruner]:
    """The registered ones, variants of DART, and unequal counts."""
    return {
        **registered_methods(layer),
        "dart v_norm": DART(keep=5, pivots="v_norm", layer=layer),
        "dart attention": DART(keep=5, pivots="attention", largest=False, layer=layer),
        "dart epsilon": DART(epsilon=0.2, layer=layer),
        "uneven": Uneven(layer=layer),
    }


def hidden_columns(model: Any, inputs: dict[str, Tensor], run: Run) -> Tensor:
    """`(batch, sequence)` bool: the columns of visual tokens that were dropped."""
    hidden = inputs["input_ids"] == IMAGE
    for row, positions in enumerate(run.positions):
        hidden[row, torch.from_numpy(positions)] = False
    return hidden


def compare_with_mask(
    model: Any, inputs: dict[str, Tensor], pruner: Pruner, steps: int = 8
) -> tuple[float, Run, Steps]:
    """Largest difference of logits between dropping and masking: kept rows of the prompt, and every decode step."""
    with prune(model, pruner) as run:
        dropped = decode(model, inputs, steps)
    hidden = hidden_columns(model, inputs, run)
    with mask_drop(model, hidden, layer=pruner.stage.layer):
        masked = decode(model, inputs, steps, forced=dropped.tokens)
    rows = ~hidden & inputs["attention_mask"].bool()
    worst = float((dropped.prompt - masked.prompt)[rows].abs().max())
    for ours, theirs in zip(dropped.logits, masked.logits, strict=True):
        worst = max(worst, float((ours - theirs).abs().max()))
    assert math.isfinite(worst)
    return worst, run, dropped


def in_float64(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a model compute in float64 throughout: its norms and its eager softmax cast to float32 by themselves."""
    text = model.model.language_model
    norm = type(text.norm)
    monkeypatch.setattr(
        norm, "forward",
        lambda self, x: self.weight * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.variance_epsilon),
    )
    monkeypatch.setattr(sys.modules[norm.__module__], "eager_attention_forward", eager_float64)
    return model.double()


def eager_float64(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Plain attention with a softmax in the dtype of its input."""
    groups = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(groups, dim=1).mT * scaling
    if attention_mask is not None:
        logits = logits + attention_mask[..., : key.shape[2]].clamp(min=-1e300)
    weights = logits.softmax(dim=-1)
    return (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2), weights
