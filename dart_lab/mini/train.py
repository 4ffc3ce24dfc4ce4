"""Train `mini`'s projector and adapters, resumably: ``python -m dart_lab.mini.train --out RUN``.

The pretrained parts are fetched where they are not in the cache yet. Every update draws fresh pictures from its number
and the seed, so a run that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from dart_lab.errors import DartLabError
from dart_lab.mini import data, start
from dart_lab.mini.folder import untrained_projector
from dart_lab.mini.get import cache_folder, put_together, wheel_folder
from dart_lab.mini.network import MiniNetwork, Packed
from dart_lab.vlm.load import load

CHECKPOINT = "checkpoint.safetensors"
SAVE_SECONDS, LOG_STEPS = 60.0, 10
STREAM = 2_003  # keeps the training's pictures apart from other drawings with the same seed
BETAS, EPS = (0.9, 0.98), 1e-8


@dataclass(frozen=True)
class Phase:
    """A stretch of updates; the learning rate goes linearly from ``lr`` to ``lr_end``.

    ``window`` is the side of the part of the canvas that is drawn, in its pixels, and ``side`` that of the picture that
    the tower gets; small windows hold one to three objects. ``shown`` is the share of the visual tokens, drawn anew for
    every picture, that the language model sees.
    """

    window: int
    side: int
    steps: int
    lr: float
    lr_end: float
    shown: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """All that shapes a run but its seed: pictures an update, questions a picture, and the phases.

    With ``half`` frozen weights, matrix products and attention are in bfloat16; what is trained, norms and the loss
    stay in float32.
    """

    phases: tuple[Phase, ...] = (
        Phase(168, 168, 480, 2e-3, 2e-3, shown=0.6),
        Phase(224, 224, 160, 2e-3, 2e-3, shown=0.5),
        Phase(336, 336, 160, 2e-3, 1e-3, shown=0.25),
        Phase(336, 336, 50, 1e-3, 1e-4, shown=0.5),
    )
    pictures: int = 2
    questions: int = 12
    warmup: int = 20
    clip: float = 1.0
    projector_share: float = 0.4  # of the learning rate, for the projector
    half: bool = False


MINI = Recipe()
# Goes on from the exported weights of MINI, with fresh moments; another seed gives it other pictures
MORE = Recipe(
    phases=(
        Phase(336, 336, 500, 1.5e-3, 8e-4, shown=0.25),
        Phase(336, 336, 150, 8e-4, 5e-5, shown=0.5),
        Phase(336, 336, 250, 1e-3, 5e-5, shown=0.5),
    ),
    half=True,
)
# Each goes on from what the one before left, likewise
THIRD = Recipe(phases=(Phase(336, 336, 1200, 1.5e-3, 2e-5, shown=0.5),), half=True)
FOURTH = Recipe(phases=(Phase(336, 336, 240, 1e-3, 5e-4, shown=0.5), Phase(336, 336, 140, 5e-4, 2e-5)), half=True)
RUNS = (MINI, MORE, THIRD, FOURTH)


@dataclass
class Progress:
    """Where a run stands; ``averages`` are running means of what the log shows."""

    phase: int = 0
    step: int = 0
    updates: int = 0
    averages: dict[str, float] = field(default_factory=dict)

    def note(self, values: dict[str, float], rate: float = 0.05) -> None:
        """Mix new values into the running averages."""
        for name, value in values.items():
            old = self.averages.get(name, value)
            self.averages[name] = old + rate * (value - old)


class Adam:
    """Adam with a clipped gradient; ``state`` holds the parameters and all else that a resumed run needs."""

    def __init__(self, network: MiniNetwork, recipe: Recipe) -> None:
        self.parameters, self.recipe = dict(network.named_parameters()), recipe
        self.moments = {
            kind: {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
            for kind in ("first", "second")
        }

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors by name."""
        held = {"value": {name: parameter.detach() for name, parameter in self.parameters.items()}, **self.moments}
        return {f"{kind}.{name}": tensor for kind, own in held.items() for name, tensor in own.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from ``state``."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def step(self, number: int, lr: float) -> float:
        """Update number ``number``, from 1; clears the gradients and returns their norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.clip)
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is None:
                continue
            first, second = self.moments["first"][name], self.moments["second"][name]
            first.lerp_(grad, 1 - BETAS[0])
            second.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
            scale = (second / (1 - BETAS[1] ** number)).sqrt_().add_(EPS)
            share = self.recipe.projector_share if name.startswith("projector.") else 1.0
            parameter.addcdiv_(first, scale, value=-lr * share / (1 - BETAS[0] ** number))
            parameter.grad = None
        return float(norm)


def half_precision(wanted: bool) -> torch.autocast:
    """A context in which matrix products and attention run in bfloat16, or nothing changes."""
    return torch.autocast("cpu", torch.bfloat16, enabled=wanted)


def loss_of(
    network: MiniNetwork, features: Tensor, packed: Packed, shown: Tensor | None = None
) -> tuple[Tensor, list[list[bool]]]:
    """Mean loss of the answers' tokens, and whether every question's answer is exactly right.

    The language model sees all visual tokens, or only ``shown`` (batch, tokens) of them, at their original positions.
    """
    whole = None
    if shown is not None:
        whole = features.shape[1]
        features = features.gather(1, shown[:, :, None].expand(-1, -1, features.shape[2]))
    logits, wanted = network.answer(features, packed, shown, whole), packed.target[packed.target >= 0]
    right = torch.ones_like(packed.target, dtype=torch.bool)
    right[packed.target >= 0] = logits.argmax(-1) == wanted
    answers = [
        [bool(right[row][packed.segment[row] == number].all()) for number in range(int(packed.segment[row].max()) + 1)]
        for row in range(len(right))
    ]
    return F.cross_entropy(logits, wanted), answers


def some(pictures: int, tokens: int, share: float, rng: np.random.Generator) -> Tensor | None:
    """A share of the tokens of every picture (pictures, shown), drawn evenly, ascending; None: all."""
    if share == 1:
        return None
    wanted = max(1, round(share * tokens))
    return torch.from_numpy(np.sort(np.stack([rng.permutation(tokens)[:wanted] for _ in range(pictures)])))


def save(out: Path, optimizer: Adam, progress: Progress, seed: int) -> None:
    """Write the run's state beside its final place and move it there."""
    state = {"phase": progress.phase, "step": progress.step, "updates": progress.updates, "averages": progress.averages}
    partial = out / (CHECKPOINT + ".part")
    tensors = {name: tensor.contiguous() for name, tensor in optimizer.state.items()}
    save_file(tensors, partial, {"progress": json.dumps(state), "seed": str(seed)})
    os.replace(partial, out / CHECKPOINT)


def resume(out: Path, optimizer: Adam, seed: int) -> Progress | None:
    """Load the last checkpoint of the folder into ``optimizer``; None where there is none.

    Raises:
        DartLabError: the checkpoint is of another seed.
    """
    path = out / CHECKPOINT
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        if metadata["seed"] != str(seed):
            raise DartLabError(f"{path} is of seed {metadata['seed']}, not {seed}: choose another --out")
        optimizer.load({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return Progress(**json.loads(metadata["progress"]))


def train(
    model: Any,
    tokenizer: Any,
    out: Path,
    *,
    seed: int = 0,
    recipe: Recipe = MINI,
    begin: Path | None = None,
    stop_after: int | None = None,
) -> MiniNetwork:
    """Run or resume a training in the folder ``out``; with ``stop_after`` only up to so many updates.

    Args:
        model: `mini`'s parts as a `LlavaForConditionalGeneration` in float32; it is taken apart.
        tokenizer: a `tokenizers.Tokenizer`.
        out: folder of the run's checkpoint.
        seed: seed of weights and pictures.
        recipe: what is done.
        begin: weights to begin with, as `dart_lab.mini.export` wrote them; None: the fit of `start`.
        stop_after: number of updates after which to stop, counted from the start of the run.

    Raises:
        DartLabError: ``out`` holds a checkpoint of another seed.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    network = MiniNetwork(model, torch.bfloat16 if recipe.half else torch.float32)
    optimizer = Adam(network, recipe)
    progress = resume(out, optimizer, seed)
    began = saved = time.monotonic()
    if progress is None:
        if begin is None:
            found = start.fit(network, tokenizer, _rng(seed, 0, 0))
            print("start of the projector, variance left:", found, f"{time.monotonic() - began:.0f} s", flush=True)
            network.zero_grad()
        else:
            network.load_state_dict(load_file(begin))
        progress = Progress()
        save(out, optimizer, progress, seed)
    while progress.phase < len(recipe.phases) and progress.updates != stop_after:
        phase = recipe.phases[progress.phase]
        rng = _rng(seed, progress.phase + 1, progress.step)
        drawn = data.draw(rng, recipe.pictures, recipe.questions, phase.window)
        with half_precision(recipe.half):
            features = network.look(data.pixels_of([picture.image for picture, _ in drawn], phase.side)).float()
            shown = some(len(features), features.shape[1], phase.shown, rng)
            loss, right = loss_of(network, features, data.pack(tokenizer, [asked for _, asked in drawn]), shown)
        loss.backward()
        lr = phase.lr + (phase.lr_end - phase.lr) * progress.step / phase.steps
        progress.updates += 1
        log = {"loss": float(loss.detach())}
        log["norm"] = optimizer.step(progress.updates, lr * min(1.0, progress.updates / recipe.warmup))
        for family in data.FAMILIES:
            hits = [hit for (_, asked), row in zip(drawn, right, strict=True)
                    for question, hit in zip(asked, row, strict=True) if question.family == family]  # fmt: skip
            if hits:
                log[f"{family}"] = float(np.mean(hits))
        progress.note(log)
        progress.step += 1
        if progress.step % LOG_STEPS == 0:
            averages = " ".join(f"{name} {value:.3f}" for name, value in progress.averages.items())
            at = f"phase {progress.phase} step {progress.step}/{phase.steps} {time.monotonic() - began:.0f} s"
            print(at, averages, flush=True)
        if progress.step == phase.steps:
            progress.phase, progress.step, progress.averages = progress.phase + 1, 0, {}
        if time.monotonic() - saved > SAVE_SECONDS:
            save(out, optimizer, progress, seed)
            saved = time.monotonic()
    save(out, optimizer, progress, seed)
    return network


def _rng(seed: int, phase: int, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((STREAM, seed, phase, step))))


def main() -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(description="Train the projector and the adapters of mini on the drawn world.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and pictures (default 0)")
    parser.add_argument("--more", type=Path, metavar="WEIGHTS", help="exported weights to go on from")
    parser.add_argument("--run", type=int, default=1, choices=range(1, len(RUNS) + 1), help="which run (default 1)")
    arguments = parser.parse_args()
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    parts = arguments.out / "parts"
    if not (parts / "config.json").is_file():
        put_together(parts, wheel_folder(cache_folder()), untrained_projector(), echo=print)
    model = load(parts, dtype=torch.float32, device="cpu").model
    tokenizer = Tokenizer.from_file(str(parts / "tokenizer.json"))
    recipe = RUNS[arguments.run - 1]
    train(model, tokenizer, arguments.out, seed=arguments.seed, recipe=recipe, begin=arguments.more)


if __name__ == "__main__":
    main()
