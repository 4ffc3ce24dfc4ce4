"""From decisions about crops, as the vision tower sees them, to one decision about each sample's visual tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.reduction import PAD, Merge, Reduction
from dart_lab.pruners.selectors import ascending
from dart_lab.vlm.layout import BLENDED, NO_PATCH, VisualTokens
from dart_lab.vlm.vision import CLASS_TOKEN_PLACE


@dataclass(frozen=True, eq=False)
class Packing:
    """How the crops of one sample become its visual tokens.

    `rows`: the sample's crops among those of the tower; `where` `(crops · per_crop,)`: the token that each patch
    becomes, -1 if it does not go on; `loose`: tokens that no patch becomes, which always stay; `tokens`: how many.
    """

    rows: list[int]
    where: Tensor
    loose: Tensor
    tokens: int


def packing(tokens: VisualTokens, pictures: Sequence[range], per_crop: int, device: torch.device) -> Packing:
    """The packing of a sample whose pictures occupy these rows of the tower.

    Raises:
        DartLabError: tokens blended from several patches, of which a decision about patches says nothing.
    """
    rows = [row for picture in pictures for row in picture]
    if tokens.patch is None:
        identity = torch.arange(len(rows) * per_crop, device=device)
        return Packing(rows, identity, identity[:0], len(identity))
    if (tokens.patch == BLENDED).any():
        raise DartLabError(
            "the model shrinks this picture or video behind the projector, so that its tokens are blends of patches; "
            "reduce with a method that acts before or inside the language model (stage LLM_IN or a decoder layer)"
        )
    first = np.cumsum([0, *(len(picture) for picture in pictures)])
    own = tokens.patch != NO_PATCH
    place = ((first[tokens.image] + tokens.crop) * per_crop + tokens.patch)[own]
    where = torch.full((len(rows) * per_crop,), PAD, device=device)
    where[torch.from_numpy(place).to(device)] = torch.from_numpy(np.flatnonzero(own)).to(device)
    return Packing(rows, where, torch.from_numpy(np.flatnonzero(~own)).to(device), len(tokens))


def join_crops(crops: Reduction, samples: Sequence[Packing]) -> Reduction:
    """Join what was decided about the crops of every sample: `(crops, …)` → `(samples, …)`, in the samples' numbers."""
    per_crop = int(crops.size[0])
    if all(len(sample.rows) == 1 and len(sample.where) == sample.tokens for sample in samples):
        return _rows_of(crops, torch.tensor([sample.rows[0] for sample in samples], device=crops.keep.device))
    parts = [_sample(crops, sample, per_crop) for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    sequence = pad([part[0] for part in parts], batch_first=True, padding_value=PAD)
    device = sequence.device
    notes = {}
    if CLASS_TOKEN_PLACE in crops.notes:
        hosts = [part[2] for part in parts]
        notes[CLASS_TOKEN_PLACE] = pad(hosts, batch_first=True, padding_value=PAD)
    merge = None
    if crops.merge is not None:
        columns = zip(*(part[1] for part in parts), strict=True)
        slot, source, weight = (
            pad(list(column), batch_first=True, padding_value=empty)
            for column, empty in zip(columns, (PAD, 0, 0), strict=True)
        )
        merge = Merge(slot=slot, source=source, weight=weight)
    return Reduction(
        keep=ascending(sequence),
        size=torch.tensor([sample.tokens for sample in samples], device=device),
        asked=torch.stack([crops.asked[sample.rows].sum() + len(sample.loose) for sample in samples]),
        slots=sequence,
        merge=merge,
        notes=notes,
    )


def _sample(
    crops: Reduction, sample: Packing, per_crop: int
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Slots of one sample as tokens, what they are made of (slot, source, weight), and hosts of class tokens."""
    none = crops.sequence.new_empty(0)
    slots = [crops.sequence[row] for row in sample.rows]
    counts = [int((slot != PAD).sum()) for slot in slots]
    starts = np.cumsum([0, *counts])

    def token(index: Tensor, crop: int) -> Tensor:
        return sample.where[index.clamp(min=0) + crop * per_crop].masked_fill(index == PAD, PAD)

    found = torch.cat([none, *(token(slot[slot != PAD], i) for i, slot in enumerate(slots))])
    alive = found != PAD
    sequence = torch.cat([found[alive], sample.loose])
    moved = torch.full_like(found, PAD)
    moved[alive] = torch.arange(int(alive.sum()), device=found.device)
    if len(sample.loose):  # newlines have their places between the patches
        sequence, order = sequence.sort()
        rank = order.argsort()
        moved[alive] = rank[moved[alive]]
        loose = rank[int(alive.sum()) :]
    else:
        loose = none
    hosts = none
    if CLASS_TOKEN_PLACE in crops.notes and sample.rows:
        place = crops.notes[CLASS_TOKEN_PLACE][:, 0]
        hosts = torch.stack([token(place[row], i) for i, row in enumerate(sample.rows)])
    if crops.merge is None:
        return sequence, (none, none, none.float()), hosts
    merge = crops.merge
    entries: list[tuple[Tensor, Tensor, Tensor]] = [(loose, sample.loose, torch.ones_like(loose, dtype=torch.float32))]
    for i, row in enumerate(sample.rows):
        used = merge.slot[row] != PAD
        slot, source = moved[merge.slot[row][used] + int(starts[i])], token(merge.source[row][used], i)
        goes_on = (slot != PAD) & (source != PAD)
        entries.append((slot[goes_on], source[goes_on], merge.weight[row][used][goes_on]))
    slot, source, weight = (torch.cat(list(column)) for column in zip(*entries, strict=True))
    return sequence, (slot, source, weight), hosts


def _rows_of(reduction: Reduction, index: Tensor) -> Reduction:
    """Some samples of a reduction, in the order of `index`."""

    def pick(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[index]

    merge = reduction.merge
    return Reduction(
        keep=reduction.keep[index],
        size=reduction.size[index],
        asked=reduction.asked[index],
        order=pick(reduction.order),
        score=pick(reduction.score),
        slots=pick(reduction.slots),
        sizes=pick(reduction.sizes),
        merge=None
        if merge is None
        else Merge(slot=merge.slot[index], source=merge.source[index], weight=merge.weight[index]),
        notes={name: note[index] for name, note in reduction.notes.items()},
    )
