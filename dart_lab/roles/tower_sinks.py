"""The channels on which sinks of a vision tower spike, from the tokens with the largest norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.roles.pool import Pool, Survey
from dart_lab.roles.sinks import sink_channels
from dart_lab.vlm.states import visual_states

if TYPE_CHECKING:
    from dart_lab.roles.fit import Fit


@dataclass(frozen=True, kw_only=True)
class TowerChannels:
    """Channels of the vision features, ascending; empty: there is none. `why`: the evidence in words."""

    channels: tuple[int, ...]
    why: str


def find_tower_channels(vlm: Any, pool: Pool, how: Fit) -> TowerChannels:
    """Look at the token with the largest norm of each reference picture.

    A channel counts if it spikes on that token, by the rule of `sink_channels`, in `how.often` of the pictures, and is
    `how.distinct` times as large there as on the median token. Pictures that cannot be opened are passed over.
    """
    features = _features(vlm, pool, how.references)
    if not features:
        return TowerChannels(channels=(), why="features and tokens are not one to one in this model")
    loud, rest = [], []
    for one in features:
        place = int(one.norm(dim=-1).argmax())
        loud.append(one[place])
        rest.append(one.abs().median(dim=0).values)
    top, typical = torch.stack(loud), torch.stack(rest)
    median = torch.stack([one.abs().median() for one in features])
    found = sink_channels(top[:, None], median, floor=how.floor, times_median=how.times_median, share=how.energy,
                          layers=how.often)  # fmt: skip
    size, usual = top.abs().median(dim=0).values, typical.median(dim=0).values
    channels = tuple(c for c in found.channels if bool(size[c] > how.distinct * usual[c]))
    where = f"the tokens with the largest norms of {len(features)} pictures"
    if not channels:
        return TowerChannels(channels=(), why=f"no channel is large on {where} alone")
    return TowerChannels(channels=channels, why=f"channels {list(channels)} spike on {where} ({found.rule} rule)")


def _features(vlm: Any, pool: Pool, wanted: int) -> list[Tensor]:
    """`(n, vision channels)` float32 of the first pictures that can be used; none where patches are merged."""
    out: list[Tensor] = []
    for number in range(len(pool)):
        if len(out) == wanted:
            break
        try:
            inputs = vlm.prepare([pool[number]], [Survey.question])
        except DartLabError:
            continue
        vision = visual_states(vlm, inputs)[0].vision
        if vision is None:
            return []
        if bool(torch.isfinite(vision).all()):
            out.append(vision.float().cpu())
    return out
