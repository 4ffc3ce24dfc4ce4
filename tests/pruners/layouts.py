"""Made-up prompts with the layouts of real model families, and every registered method in a size that fits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from dart_lab.pruners import (
    DART,
    FiCoCoL,
    FiCoCoV,
    MustDrop,
    Pruner,
    PyramidDrop,
    Signals,
    SparseVLM,
    ToMe,
    V2Drop,
    pruner_class,
    pruner_names,
)
from dart_lab.pruners.catalogue import example
from dart_lab.pruners.reduction import PAD

CHANNELS, HEADS, KV_HEADS, WIDTH = 12, 4, 2, 6
TOWER = ("VIT_BLOCK", "VISION_OUT")
KEEP = 4  # fits every layout below, and is a product of two sides on each of their grids
#: Methods of many stages or pivots, in a size for small prompts; any other is `catalogue.example`.
SMALL: Mapping[str, Pruner] = MappingProxyType({
    "dart": DART(keep=KEEP, image_pivots=1, text_pivots=1),
    "ficoco-l": FiCoCoL(keep=KEEP, layer=2, layers=2),
    "ficoco-v": FiCoCoV(keep=KEEP, first=0, blocks=2),
    "mustdrop": MustDrop(layers=(2, 3), window=2, similarity=0.0, global_share=0.05, individual=0.05),
    "pyramiddrop": PyramidDrop(schedule=(0.5, 0.25), layers=(2, 3)),
    "sparsevlm": SparseVLM(schedule=(0.5, 0.25), layers=(2, 3)),
    "tome": ToMe(keep=0.4, blocks=2),
    "v2drop": V2Drop(schedule=(0.5, 0.25), layers=(2, 3)),
})


@dataclass(frozen=True)
class Prompt:
    """Views `(image, crop, rows, columns)`, one after the other; `newlines`: a token off the grid ends their rows."""

    views: tuple[tuple[int, int, int, int], ...]
    before: int = 3
    after: int = 4
    newlines: bool = False


LAYOUTS: Mapping[str, tuple[Prompt, ...]] = MappingProxyType({
    "a square": (Prompt(((0, 0, 4, 4),)),),
    "a base view and unlike tiles": (Prompt(((0, 0, 4, 4), (0, 1, 2, 3), (0, 2, 3, 4)), newlines=True),),
    "frames": (Prompt(tuple((0, frame, 2, 4) for frame in range(3))),),
    "frames that share their places": (Prompt(((0, 0, 2, 4),) * 3),),
    "merged patches": (Prompt(((0, 0, 3, 5),)),),
    "two images of unlike sizes": (Prompt(((0, 0, 2, 3), (1, 0, 4, 3))),),
    "no question": (Prompt(((0, 0, 3, 4),), after=0),),
    "left padded": (
        Prompt(((0, 0, 4, 6),)), Prompt(((0, 0, 3, 3),), before=1, after=2),
        Prompt(((0, 0, 2, 4), (1, 0, 3, 3)), after=7, newlines=True),
    ),
})


@cache
def methods() -> Mapping[str, Pruner]:
    """Every method of this package, by its name."""
    own = [name for name in pruner_names() if pruner_class(name).__module__.startswith("dart_lab.")]
    return {name: SMALL[name] if name in SMALL else sized(example(name)) for name in own}


def sized(method: Pruner) -> Pruner:
    return method if method.keep is None else replace(method, keep=KEEP)


def parts() -> dict[str, Pruner]:
    """Every single-stage method that they consist of, by method and stage."""
    found = {}
    for name, method in methods().items():
        for part in method.parts():
            found[f"{name}@{part.stage.kind}{part.stage.layer}"] = part
    return found


def in_tower(part: Pruner) -> bool:
    return part.stage.kind in TOWER


def seen_by(part: Pruner, prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """What of these prompts a method gets to see at its stage: in front of the language model, one crop and no text."""
    if part.stage.kind not in (*TOWER, "PROJECTED"):
        return prompts
    return tuple(Prompt(prompt.views[:1], before=int(in_tower(part)), after=0) for prompt in prompts)


@dataclass(frozen=True)
class Made:
    """A batch by hand: positions, and every tensor that some method asks for; attention is causal outside towers."""

    visual: Tensor
    attended: Tensor
    grid: Tensor
    tensors: Mapping[str, Tensor]
    cls: Tensor | None
    seeds: tuple[int, ...] = ()

    def signals(self, **changed: Tensor) -> Signals:
        return Signals.of(
            visual=self.visual, attended=self.attended, grid=self.grid, class_token=self.cls,
            sample_seeds=self.seeds or tuple(range(len(self.visual))), **{**self.tensors, **changed},
        )


def made(part: Pruner, prompts: tuple[Prompt, ...], seed: int = 0) -> Made:
    """Random signals of these prompts for a method at its stage, padded on the left."""
    prompts = seen_by(part, prompts)
    generator = torch.Generator().manual_seed(seed)
    with_cls = in_tower(part) and part.keeps_cls
    places = [cells(prompt) for prompt in prompts]
    lengths = [prompt.before + len(cell) + prompt.after for prompt, cell in zip(prompts, places, strict=True)]
    length, n = max(lengths), max(map(len, places)) + with_cls
    visual, grid = torch.full((len(prompts), n), PAD), torch.full((len(prompts), n, 4), PAD)
    attended = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, (prompt, cell) in enumerate(zip(prompts, places, strict=True)):
        start = length - lengths[row]
        attended[row, start:] = True
        first = start + prompt.before
        tokens, at = list(range(first, first + len(cell))), list(cell)
        if with_cls:
            tokens, at = [start, *tokens], [(0, 0, PAD, PAD), *at]
        visual[row, : len(tokens)], grid[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(at)
    names = sorted({*KINDS, *(need for need in part.needs if need.startswith("attention@"))})
    tensors = {name: drawn(name, len(prompts), length, generator) for name in names}
    for name in tensors:
        if name.startswith("attention") and name != "attention_logits":
            tensors[name] = attention(tensors[name], attended, causal=not in_tower(part))
    tensors["received"] = (tensors["attention"] * attended[:, None, :, None]).mean(dim=1).sum(dim=1)
    cls = attended.long().argmax(dim=1) if in_tower(part) else None
    return Made(visual, attended, grid, tensors, cls)


KINDS = (
    "hidden", "normed", "embeds", "delta", "keys", "values", "received", "sizes", "relevance", "survives", "attention",
    "attention_ahead", "attention_logits",
)


def drawn(name: str, batch: int, length: int, generator: torch.Generator) -> Tensor:
    if name in ("hidden", "normed", "embeds", "delta"):
        return torch.randn(batch, length, CHANNELS, generator=generator)
    if name in ("keys", "values"):
        return torch.randn(batch, KV_HEADS, length, WIDTH, generator=generator)
    if name in ("sizes", "survives"):
        return torch.ones(batch, length)
    if name in ("received", "relevance"):
        return torch.rand(batch, length, generator=generator)
    return 3 * torch.randn(batch, HEADS, length, length, generator=generator)  # logits


def attention(logits: Tensor, attended: Tensor, *, causal: bool) -> Tensor:
    """Softmax over real tokens; rows of padding are whatever they are."""
    allowed = attended[:, None, None, :].expand_as(logits)
    if causal:
        allowed = allowed & torch.ones_like(allowed).tril()
    return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(dim=3)


def cells(prompt: Prompt) -> list[tuple[int, int, int, int]]:
    """Image, crop, row, column of every visual token."""
    out: list[tuple[int, int, int, int]] = []
    for image, crop, rows, columns in prompt.views:
        for row in range(rows):
            out += [(image, crop, row, column) for column in range(columns)]
            out += [(image, crop, PAD, PAD)] if prompt.newlines else []
    return out


def only(batch: Made, row: int) -> Made:
    """One row of a batch as its own batch, without its padding; draws stay those of the row."""
    real = batch.attended[row]
    tensors = {}
    for name, tensor in batch.tensors.items():
        if name.startswith("attention"):
            tensors[name] = tensor[row : row + 1][:, :, real][:, :, :, real]
        elif name in ("keys", "values"):
            tensors[name] = tensor[row : row + 1][:, :, real]
        else:
            tensors[name] = tensor[row : row + 1, real]
    start, valid = int(real.long().argmax()), batch.visual[row] != PAD
    return Made(
        batch.visual[row : row + 1, valid] - start, batch.attended[row : row + 1, real],
        batch.grid[row : row + 1, valid], tensors, None if batch.cls is None else batch.cls[row : row + 1] - start,
        seeds=(row,),
    )


def permuted(part: Pruner, batch: Made, seed: int) -> tuple[Made, Tensor]:
    """The first sample with its visual tokens in another order, the class token where it was, and that order."""
    one = only(batch, 0)
    n, fixed = one.visual.shape[1], int(in_tower(part) and part.keeps_cls)
    order = torch.randperm(n - fixed, generator=torch.Generator().manual_seed(seed)) + fixed
    order = torch.cat([torch.arange(fixed), order])
    places = torch.arange(one.attended.shape[1])
    places[one.visual[0]] = one.visual[0, order]
    tensors = {}
    for name, tensor in one.tensors.items():
        if name.startswith("attention"):
            tensors[name] = tensor[:, :, places][:, :, :, places]
        else:
            tensors[name] = tensor[:, :, places] if name in ("keys", "values") else tensor[:, places]
    return replace(one, grid=one.grid[:, order], tensors=tensors), order


def asked_otherwise(part: Pruner, batch: Made, seed: int) -> Made:
    """The same prompts, two images of unlike sizes, with other numbers wherever the text behind them has its say."""
    other = made(part, LAYOUTS["two images of unlike sizes"], seed=seed)
    after = torch.arange(batch.attended.shape[1]) > batch.visual.max(dim=1).values[:, None]
    tensors = {}
    for name, tensor in batch.tensors.items():
        if name.startswith("attention"):
            mask = after[:, None, :, None] | (after[:, None, None, :] if name == "attention_logits" else False)
        else:
            mask = after[:, None, :, None] if name in ("keys", "values") else after
            mask = mask[:, :, None] if name in ("hidden", "normed", "embeds", "delta") else mask
        tensors[name] = torch.where(mask, other.tensors[name], tensor)
    tensors["received"] = (tensors["attention"] * batch.attended[:, None, :, None]).mean(dim=1).sum(dim=1)
    tensors["relevance"] = other.tensors["relevance"]
    return replace(batch, tensors=tensors)
