"""Where the training of the projector starts: patches become the words for what they show.

The output of the projector is fitted, by regression and without the language model, to embeddings of the color, the
shape and the side of the picture; a patch without an object becomes " nothing".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dart_lab.mini import data
from dart_lab.mini.configs import PATCH
from dart_lab.mini.network import MiniNetwork
from dart_lab.tasks import scene
from dart_lab.tiny.data import covering

NOTHING, PLATE = " nothing", " number"
SIDES = ((" left", " right"), (" top", " bottom"))
PLACE_WEIGHT = 0.5  # of the sides beside color and shape
RIDGE = 1e-3  # of the closed-form solution, as a share of the mean variance
PICTURES, STEPS, BATCH, LR = {168: 240, 336: 60}, 1500, 512, 2e-3


def word(tokenizer: Any, embedding: Tensor, text: str) -> Tensor:
    """(width,) embedding of a word, the mean over its tokens."""
    return embedding[torch.tensor(tokenizer.encode(text).ids)].mean(dim=0)


def targets(drawn: scene.Scene, side: int, tokenizer: Any, embedding: Tensor) -> Tensor:
    """(patches, width): what the projector should give for every patch of a picture drawn on ``side`` pixels."""
    grid = side // PATCH
    words = [word(tokenizer, embedding, NOTHING)]
    words += [
        (word(tokenizer, embedding, f" {thing.color}") + word(tokenizer, embedding, f" {thing.shape}")) / 2
        for thing in drawn.things
    ]
    words.append(word(tokenizer, embedding, PLATE))
    shown = torch.stack(words)[torch.from_numpy(covering(drawn, drawn.side // grid))]
    along = (torch.arange(grid) + 0.5) / grid
    across, down = along.repeat(grid)[:, None], along.repeat_interleave(grid)[:, None]
    for part, (low, high) in zip((across, down), SIDES, strict=True):
        ends = [word(tokenizer, embedding, text) for text in (low, high)]
        shown = shown + PLACE_WEIGHT / 2 * ((1 - part) * ends[0] + part * ends[1])
    return shown


def examples(network: MiniNetwork, tokenizer: Any, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Features (patches, vision width) and targets (patches, width) of fresh pictures of both sizes."""
    features, wanted = [], []
    for side, pictures in PICTURES.items():
        for _ in range(pictures):
            drawn = scene.compose(rng)
            features.append(network.look(data.pixels_of([drawn.image], side))[0])
            wanted.append(targets(drawn, side, tokenizer, network.embedding))
    return torch.cat(features), torch.cat(wanted)


def fit(network: MiniNetwork, tokenizer: Any, rng: np.random.Generator) -> dict[str, float]:
    """Fit the projector in place; the share of the targets' variance that is left, before and after the gradient steps.

    The second map has a closed form, ridge regression on the first map's outputs; gradient steps then improve both.
    """
    features, wanted = examples(network, tokenizer, rng)
    projector = network.projector
    first, second = projector.linear_1, projector.linear_2
    mean, spread = features.mean(dim=0), features.std(dim=0) + 1e-6
    with torch.no_grad():
        draws = torch.from_numpy(rng.normal(size=first.weight.shape)).float() * features.shape[1] ** -0.5
        first.weight.copy_(draws / spread)
        first.bias.copy_(-first.weight @ mean)
        hidden = F.gelu(first(features))
        hidden = torch.cat([hidden, torch.ones(len(hidden), 1)], dim=1)
        gram = hidden.T @ hidden
        gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
        solved = torch.linalg.solve(gram, hidden.T @ wanted)
        second.weight.copy_(solved[:-1].T)
        second.bias.copy_(solved[-1])
    variance = float((wanted - wanted.mean(dim=0)).square().mean())
    left = [float((projector(features) - wanted).detach().square().mean()) / variance]
    optimizer = torch.optim.Adam(projector.parameters(), lr=LR)
    for step in range(STEPS):
        chosen = torch.from_numpy(rng.integers(0, len(features), size=BATCH))
        loss = (projector(features[chosen]) - wanted[chosen]).square().mean() / variance
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
    left.append(float((projector(features) - wanted).detach().square().mean()) / variance)
    return {"closed form": left[0], "after steps": left[1]}
