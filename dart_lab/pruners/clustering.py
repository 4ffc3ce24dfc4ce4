"""Density-peak clustering of tokens, and assignment to given centres."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dart_lab.pruners.assignment import slot_of
from dart_lab.pruners.reduction import PAD, gather_tokens
from dart_lab.pruners.selectors import top_k

Distance = Literal["euclidean", "cosine"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Clusters:
    """`centre` `(batch, c)` int64 points, best first, padded with -1; `member` `(batch, m)` int64, the cluster of each
    point, -1 for padding; `density` and `score` `(batch, m)` float32."""

    centre: Tensor
    member: Tensor
    density: Tensor
    score: Tensor


def pairwise(a: Tensor, b: Tensor, kind: Distance = "euclidean") -> Tensor:
    """Distances of a `(batch, p, channels)` and b `(batch, q, channels)` → `(batch, p, q)` float32.

    Euclidean distances are divided by √channels. No `(p, q, channels)` array is made.
    """
    if kind == "cosine":
        a, b = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (a, b))
        return 1 - a @ b.mT
    exact = torch.cdist(a.float(), b.float(), compute_mode="donot_use_mm_for_euclid_dist")
    return exact / a.shape[-1] ** 0.5


def dpc_knn(
    x: Tensor, clusters: Tensor, valid: Tensor, *, neighbours: Tensor | None = None, noise: Tensor | None = None,
    assign: Distance = "euclidean",
) -> Clusters:
    """Density-peak clustering with k nearest neighbours (DPC-KNN; Du, Ding and Jia, 2016).

    A point's density is ρ = exp(−mean squared distance to its k nearest points, itself included); its δ is the distance
    to the nearest point of higher density, or the largest distance of all for the densest point. The `clusters` points
    of largest ρ·δ are the centres; every other point joins the nearest one.

    Args:
        x: `(batch, m, channels)`; distances are Euclidean, divided by √channels, in float32.
        clusters: `(batch,)` int64, how many clusters.
        valid: `(batch, m)` bool.
        neighbours: `(batch,)` int64, k; None: as many as clusters.
        noise: `(batch, m)`, added to the densities; None: equal densities count as higher at the lower index.
        assign: what "nearest centre" is measured by.

    >>> x = torch.tensor([[[0.0], [1.0], [8.0], [9.0], [11.0]]])
    >>> found = dpc_knn(x, torch.tensor([2]), torch.ones(1, 5, dtype=torch.bool))
    >>> found.centre, found.member
    (tensor([[0, 2]]), tensor([[0, 0, 1, 1, 1]]))
    """
    m = x.shape[1]
    distance = pairwise(x, x)
    pair = valid[:, :, None] & valid[:, None, :]
    k = (clusters if neighbours is None else neighbours).minimum(valid.sum(dim=1)).clamp(min=1)
    squared = distance.square().masked_fill(~pair, float("inf")).sort(dim=2).values
    counted = torch.arange(m, device=x.device) < k[:, None, None]
    density = torch.exp(-squared.masked_fill(~counted, 0.0).sum(dim=2) / k[:, None])
    if noise is not None:
        density = density + noise
    place = torch.arange(m, device=x.device)
    denser = density[:, None, :] > density[:, :, None]
    denser |= (density[:, None, :] == density[:, :, None]) & (place[None, None, :] < place[None, :, None])
    largest = distance.masked_fill(~pair, 0.0).flatten(1).amax(dim=1) if m else distance.new_zeros(len(x))
    peak = distance.masked_fill(~(denser & pair), float("inf"))
    delta = torch.minimum(peak.amin(dim=2), largest[:, None]) if m else density
    score = density * delta
    centre = top_k(score, clusters.minimum(valid.sum(dim=1)), valid)
    return Clusters(centre=centre, member=nearest(x, centre, valid, kind=assign), density=density, score=score)


def nearest(x: Tensor, centre: Tensor, valid: Tensor, *, kind: Distance = "euclidean") -> Tensor:
    """Which centre is nearest to each point: `(batch, m)` int64, -1 for padding; a centre belongs to itself.

    Args:
        x: `(batch, m, channels)`.
        centre: `(batch, c)` int64 points, padded with -1; of equally near ones the first wins.
        valid: `(batch, m)` bool.

    >>> nearest(torch.tensor([[[0.0], [1.0], [4.0]]]), torch.tensor([[2, 0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([[1, 1, 0]])
    """
    own = slot_of(centre, x.shape[1])
    if not centre.shape[1]:
        return own
    distance = pairwise(x, gather_tokens(x, centre), kind).masked_fill((centre == PAD)[:, None, :], float("inf"))
    member = torch.where(own != PAD, own, distance.argmin(dim=2))
    return member.masked_fill(~valid, PAD)
