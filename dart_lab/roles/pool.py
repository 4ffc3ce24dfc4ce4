"""Stream a pool of pictures once and keep, for every visual token, only what the roles are read from.

The pool is cut into blocks. A block's numbers depend on the model and the pool alone, and its file is written whole or
not at all, so that a run that was stopped goes on with the next block and ends with the same bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.files import write_files
from dart_lab.roles.dead import foreign_similarity
from dart_lab.roles.sinks import energy_share
from dart_lab.vlm.images import open_image
from dart_lab.vlm.states import VisualStates, visual_states

PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
PLAN, REFERENCES = "plan.json", "references.safetensors"


@dataclass(frozen=True, eq=False)
class Pool(Sequence[Image.Image]):
    """Pictures by number, opened when they are asked for.

    Attributes:
        name: where they are from.
        size: how many.
        make: number → picture.
        details: enough to make the same pool again; plain JSON values.
    """

    name: str
    size: int
    make: Any
    details: Mapping[str, Any]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


def open_pool(images: str | Path, *, n: int | None, seed: int) -> Pool:
    """A pool from the name of a task or a folder of pictures (also in folders below it).

    Args:
        images: "shapes", or a folder.
        n: how many pictures; by default 1,000 drawn ones, or all of a folder.
        seed: of the drawn pictures, and of the choice and order of a folder's.

    Raises:
        DartLabError: neither a task nor a folder with two pictures.
    """
    from dart_lab.tasks.base import TASKS, load_task

    if n is not None and n < 2:
        raise DartLabError(f"n={n}: roles are compared between pictures; give 2 or more")
    if str(images) in TASKS:
        task = load_task(images, n=1000 if n is None else n, seed=seed)
        return Pool(task.name, len(task), lambda number: task[number].image, task.provenance())
    folder = Path(images).expanduser()
    if not folder.is_dir():
        raise DartLabError(f"{images} is neither a task nor a folder; give a folder of pictures")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURE_ENDINGS)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(found))[:n]
    chosen = [found[number] for number in order]
    if len(chosen) < 2:
        raise DartLabError(f"{folder} holds {len(found)} pictures; give a folder with 2 or more")
    names = [str(path.relative_to(folder)) for path in chosen]
    return Pool(folder.name, len(chosen), lambda number: open_image(chosen[number]), {"files": names, "seed": seed})


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is done to every picture of a pool.

    Attributes:
        channels, layers: sink channels of the language model and the layers whose inputs are looked at.
        energy: share of a token's energy on a sink channel that makes a spike.
        centred: subtract the mean of the reference tokens before tokens are compared.
        references: pictures that others are compared with.
        shares: shares of the references that must repeat a token; the second is the one that labels.
        stored: vectors kept for clustering, in all, from every picture alike.
        extremes: tokens of each picture with the largest norm, and with most spikes, kept beside those.
        question: the prompt's text; it stands behind the picture and cannot change these states.
        seed: of the choice of the stored vectors.
        batch: pictures in one pass.
        block: pictures in one file.
    """

    channels: tuple[int, ...]
    layers: tuple[int, ...]
    energy: float
    centred: bool = False
    references: int = 32
    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    stored: int = 20_000
    extremes: int = 2
    question: str = "What is in the picture?"
    seed: int = 0
    batch: int = 8
    block: int = 96


def survey(vlm: Any, pool: Pool, how: Survey, work: Path, identity: Mapping[str, Any], *, progress: bool) -> list[str]:
    """Go through the pool, or on with it; returns why pictures were left out, `number: reason`.

    Args:
        vlm: the loaded model.
        pool: the pictures.
        how: what is done.
        work: folder for the blocks.
        identity: of the model, so that a folder of another one is refused.
        progress: show a progress bar on stderr.

    Raises:
        DartLabError: the folder holds blocks of another model, pool or survey; fewer than two pictures could be used.
    """
    from tqdm import tqdm

    plan = json.dumps(
        {"identity": identity, "pool": pool.details, "size": len(pool), "survey": vars(how)}, sort_keys=True
    )
    if (work / PLAN).is_file() and (work / PLAN).read_text(encoding="utf-8") != plan:
        raise DartLabError(f"{work} holds the work of another model, pool or setting; give another --out or delete it")
    write_files({work / PLAN: plan.encode()})
    table, owner = _references(vlm, pool, how, work)
    mean = reference_mean(work).to(table.device) if how.centred else torch.zeros_like(table[0])
    starts = range(0, len(pool), how.block)
    for start in tqdm(starts, desc="pool", unit="block", disable=not progress):
        path = work / f"block-{start // how.block:05d}.npz"
        if not path.is_file():
            numbers = range(start, min(start + how.block, len(pool)))
            write_files({path: _block(vlm, pool, how, numbers, table, owner, mean)})
    return [str(line) for block in blocks(work) for line in block["skipped"]]


def blocks(work: Path) -> Iterator[dict[str, np.ndarray]]:
    """The finished blocks of a folder, one after the other.

    Each holds, a row a token: `image` its picture, `norm` (NaN where features and tokens are not one to one), `spikes`
    (share of the layers), `similar` `(tokens, shares)`; and for the stored ones `row` (of this block), `fair` (drawn
    evenly, not as an extreme) and `vector` (unit length, float16); `skipped` in words.
    """
    for path in sorted(work.glob("block-*.npz")):
        with np.load(path, allow_pickle=False) as file:
            yield {name: file[name] for name in file.files}


def _references(vlm: Any, pool: Pool, how: Survey, work: Path) -> tuple[Tensor, Tensor]:
    from safetensors.torch import load_file, save

    path = work / REFERENCES
    if not path.is_file():
        parts: list[tuple[int, Tensor]] = []
        number = 0
        while len(parts) < how.references and number < len(pool):
            states, _ = _states(vlm, pool, how, [number], layers=False)
            parts += [(number, one.embeds.float().cpu()) for _, one in states]
            number += 1
        if len(parts) < 2:
            raise DartLabError(f"only {len(parts)} pictures of {pool.name} could be used; give 2 or more")
        owner = torch.cat([torch.full((len(rows),), number) for number, rows in parts])
        table = torch.cat([rows for _, rows in parts])
        write_files({path: save({"table": table.contiguous(), "owner": owner})})
    held = load_file(path)
    return held["table"].to(vlm.model.device), held["owner"].to(vlm.model.device)


def reference_mean(work: Path) -> Tensor:
    """`(channels,)` the mean of the reference tokens of a survey that has begun."""
    from safetensors.torch import load_file

    return load_file(work / REFERENCES)["table"].mean(dim=0)


def first_states(vlm: Any, pool: Pool, how: Survey, number: int) -> Tensor | None:
    """`(layers, tokens, channels)` of the first pictures' visual tokens; None without sink channels or pictures."""
    if not how.channels:
        return None
    found, _ = _states(vlm, pool, how, range(min(number, len(pool))), layers=True)
    if not found:
        return None
    return torch.cat([torch.stack([one.layers[layer].float() for layer in how.layers]) for _, one in found], dim=1)


def _states(
    vlm: Any, pool: Pool, how: Survey, numbers: Sequence[int], *, layers: bool
) -> tuple[list[tuple[int, VisualStates]], list[str]]:
    """States of some pictures; a picture that cannot be opened or run is named and left out."""
    pictures, skipped = [], []
    for number in numbers:
        try:
            pictures.append((number, pool[number]))
        except DartLabError as error:
            skipped.append(f"{number}: {error}")
    if not pictures:
        return [], skipped
    inputs = vlm.prepare([picture for _, picture in pictures], [how.question] * len(pictures))
    found = visual_states(vlm, inputs, how.layers if layers and how.channels else ())
    good = []
    for (number, _), one in zip(pictures, found, strict=True):
        if bool(torch.isfinite(one.embeds).all()):
            good.append((number, one))
        else:
            skipped.append(f"{number}: its states are NaN or infinite")
    return good, skipped


def _block(vlm: Any, pool: Pool, how: Survey, numbers: range, table: Tensor, owner: Tensor, mean: Tensor) -> bytes:
    """The file of one block, as bytes."""
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("image", "norm", "spikes", "similar", "row", "fair", "vector")
    }
    skipped: list[str] = []
    rows = 0
    each = max(how.stored // len(pool), 1)
    for start in range(numbers.start, numbers.stop, how.batch):
        batch = range(start, min(start + how.batch, numbers.stop))
        found, left = _states(vlm, pool, how, batch, layers=True)
        skipped += left
        for number, one in found:
            n, embeds = len(one.embeds), one.embeds.float() - mean
            similar = foreign_similarity(embeds, table - mean, owner, number, shares=how.shares).cpu().numpy()
            norm = np.full(n, np.nan, np.float32)
            if one.vision is not None:
                norm = one.vision.float().norm(dim=-1).cpu().numpy()
            spikes = np.zeros(n, np.float32)
            if how.channels:
                states = torch.stack([one.layers[layer] for layer in how.layers])
                spikes = (energy_share(states, how.channels) >= how.energy).float().mean(dim=0).cpu().numpy()
            chosen, fair = _stored(norm, spikes, each, how, number)
            vector = torch.nn.functional.normalize(embeds[chosen], dim=-1).cpu().numpy()
            values = {
                "image": np.full(n, number, np.int32), "norm": norm, "spikes": spikes, "similar": similar,
                "row": chosen.astype(np.int64) + rows, "fair": fair, "vector": vector.astype(np.float16),
            }  # fmt: skip
            for name, value in values.items():
                columns[name].append(value)
            rows += n
    arrays: dict[str, Any] = {name: np.concatenate(x) if x else np.empty(0) for name, x in columns.items()}
    buffer = io.BytesIO()
    np.savez(buffer, skipped=np.array(skipped, dtype=np.str_), **arrays)
    return buffer.getvalue()


def _stored(norm: np.ndarray, spikes: np.ndarray, each: int, how: Survey, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of a picture are kept for clustering, ascending, and which of them were drawn evenly."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((how.seed, number))))
    drawn = rng.permutation(len(norm))[:each]
    by_norm = np.argsort(-np.nan_to_num(norm, nan=0.0), kind="stable")[: how.extremes]
    by_spikes = np.argsort(-spikes, kind="stable")[: how.extremes]
    chosen = np.unique(np.concatenate([drawn, by_norm, by_spikes]))
    return chosen, np.isin(chosen, drawn)
