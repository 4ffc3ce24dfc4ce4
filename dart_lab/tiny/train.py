"""Train ``tiny``: ``python -m dart_lab.tiny.train --seed 0 --out DIR``.

The run is deterministic for a seed and a number of ranks, and resumes from the last checkpoint in its folder: killed
anywhere and started again, it ends with the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn

from dart_lab.errors import DartLabError
from dart_lab.tiny import data, losses, words
from dart_lab.tiny.network import TinyNetwork
from dart_lab.tiny.optimizer import FlatOptimizer
from dart_lab.tiny.recipe import TINY, Phase, Recipe

STREAM = 7_001  # keeps the training pictures apart from those of every task seed
CHECKPOINT = "training.safetensors"
SAVE_SECONDS = 60.0
LOG_STEPS = 20


@dataclass
class Progress:
    """Where a run stands: the next step of a phase, updates done, and running averages for the log."""

    phase: int = 0
    step: int = 0
    updates: int = 0
    averages: dict[str, float] = field(default_factory=dict)

    def note(self, values: dict[str, float], rate: float = 0.06) -> None:
        """Mix new values into the running averages."""
        for name, value in values.items():
            old = self.averages.get(name, value)
            self.averages[name] = old + rate * (value - old)


def build(recipe: Recipe, seed: int) -> tuple[TinyNetwork, nn.ModuleDict]:
    """The network and, in one dictionary with it, the read-outs of its training."""
    torch.manual_seed(seed)
    network = TinyNetwork(recipe.shape, len(words.VOCABULARY), [words.IDS[word] for word in words.PREFIX])
    return network, nn.ModuleDict({"network": network, "heads": losses.Heads(recipe.shape.width)})


def keep_of(rng: np.random.Generator, recipe: Recipe, batch: data.Batch) -> Tensor | None:
    """Visual tokens (batch, patches) that stay: all objects and a random part of the ground; None where all stay."""
    if rng.random() >= recipe.thinned:
        return None
    draws = torch.from_numpy(rng.random(batch.patches.shape.shape, dtype=np.float32))
    part = torch.from_numpy(rng.random((len(draws), 1), dtype=np.float32))
    return (batch.patches.shape != data.NONE) | (draws < part)


def loss_of(
    modules: nn.ModuleDict, recipe: Recipe, phase: Phase, batch: data.Batch, rng: np.random.Generator
) -> tuple[Tensor, dict[str, float]]:
    """Loss of one batch, and numbers for the log."""
    network: TinyNetwork = modules["network"]  # type: ignore[assignment]
    features, cls = network.look(batch.pixels, batch.origin)
    loss, log = losses.vision_loss(modules["heads"], features, cls, batch.patches)  # type: ignore[arg-type]
    log["dense"] = float(loss.detach())
    if phase.questions:
        blocked = torch.from_numpy(rng.random(len(batch.origin)) < recipe.blocked)
        outputs = network.answer(
            features, batch.origin, batch.text, late_from=recipe.late_from, blocked=blocked,
            keep=keep_of(rng, recipe, batch), rows=losses.count_rows(batch), states_after=losses.REFERENT_LAYER,
        )  # fmt: skip
        answered, right = losses.answer_loss(outputs, batch, words.IDS[words.EOS])
        log |= {"answers": float(answered.detach())} | {family: float(np.mean(hits)) for family, hits in right.items()}
        loss = loss + answered
        if outputs.rows is not None:
            counted = losses.count_loss(outputs.rows, batch, len(words.PREFIX))
            log["attention"] = float(counted.detach())
            loss = loss + phase.count * counted
        if phase.referent and outputs.states is not None and len(batch.referent_at):
            located = losses.referent_loss(modules["heads"], outputs.states, batch)  # type: ignore[arg-type]
            log["place"] = float(located.detach())
            loss = loss + phase.referent * located
    return loss, log


def save(out: Path, optimizer: FlatOptimizer, progress: Progress, seed: int) -> None:
    """Write the run's state beside its final place and move it there."""
    state = {"phase": progress.phase, "step": progress.step, "updates": progress.updates, "averages": progress.averages}
    partial = out / (CHECKPOINT + ".part")
    save_file(optimizer.state, partial, {"progress": json.dumps(state), "seed": str(seed)})
    os.replace(partial, out / CHECKPOINT)


def resume(out: Path, optimizer: FlatOptimizer, seed: int) -> Progress:
    """Load the last checkpoint of the folder into ``optimizer``; a fresh start where there is none.

    Raises:
        DartLabError: the checkpoint is of another seed.
    """
    path = out / CHECKPOINT
    if not path.exists():
        return Progress()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        if metadata["seed"] != str(seed):
            raise DartLabError(f"{path} is of seed {metadata['seed']}, not {seed}: choose another --out")
        optimizer.load({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return Progress(**json.loads(metadata["progress"]))


def work(rank: int, recipe: Recipe, seed: int, out: Path, stop_after: int | None) -> None:
    """One rank of a run; all ranks hold the same weights and average their gradients."""
    torch.set_num_threads(1)
    if recipe.ranks > 1:
        meeting = f"file://{out.resolve()}/meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=recipe.ranks)
    network, modules = build(recipe, seed)
    network.multiply_in(torch.bfloat16)
    optimizer = FlatOptimizer(modules, recipe.weight_decay, recipe.clip)
    progress = resume(out, optimizer, seed)
    started = saved = time.monotonic()
    while progress.phase < len(recipe.phases) and progress.updates != stop_after:
        phase = recipe.phases[progress.phase]
        entropy = (STREAM, seed, progress.phase, progress.step, rank)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
        batch = data.make_batch(
            rng, grid=phase.grid, images=phase.images, questions_each=phase.questions, shares=phase.shares
        )
        loss, log = loss_of(modules, recipe, phase, batch, rng)
        loss.backward()  # type: ignore[no-untyped-call]
        if recipe.ranks > 1:
            distributed.all_reduce(optimizer.grad)
            optimizer.grad.div_(recipe.ranks)
        lr = phase.lr + (phase.lr_end - phase.lr) * progress.step / phase.steps
        progress.updates += 1
        log["norm"] = optimizer.step(progress.updates, lr * min(1.0, (progress.step + 1) / recipe.warmup))
        progress.note(log)
        progress.step += 1
        now = time.monotonic()
        if rank == 0 and progress.step % LOG_STEPS == 0:
            shown = " ".join(f"{name} {value:.3f}" for name, value in progress.averages.items())
            at = f"phase {progress.phase} step {progress.step}/{phase.steps} {now - started:.0f} s lr {lr:.1e}"
            print(at, shown, flush=True)
        if progress.step == phase.steps:
            progress.phase, progress.step, progress.averages = progress.phase + 1, 0, {}
        if rank == 0 and now - saved > SAVE_SECONDS:
            save(out, optimizer, progress, seed)
            saved = now
    if rank == 0:
        save(out, optimizer, progress, seed)
    if recipe.ranks > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def train(recipe: Recipe, seed: int, out: Path, stop_after: int | None = None) -> None:
    """Run or resume a training in the folder ``out``; with ``stop_after`` only up to so many updates."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "meeting").unlink(missing_ok=True)
    if recipe.ranks == 1:
        work(0, recipe, seed, out, stop_after)
    else:
        spawn(work, args=(recipe, seed, out, stop_after), nprocs=recipe.ranks)  # type: ignore[no-untyped-call]


def main() -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(description="Train the embedded model tiny on the drawn world.")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and pictures (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run's checkpoints")
    arguments = parser.parse_args()
    train(TINY, arguments.seed, arguments.out)


if __name__ == "__main__":
    main()
