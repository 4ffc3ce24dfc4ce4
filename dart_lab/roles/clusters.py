"""Clusters on the unit sphere, and the centroids by which they are known again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dart_lab.errors import DartLabError

APART = 0.5  # silhouette that two clusters of dead vectors must reach
SAME_VECTOR = 1e-2  # distance on the unit sphere below which vectors are copies (they are stored in half precision)
MOST = 0.9  # of a dense cluster's points are within its reach: a few far ones are counted to it too
SAMPLE = 2000  # points of which silhouettes and densities are taken, since both are quadratic


@dataclass(frozen=True, eq=False)
class Clusters:
    """Clusters of a pool's tokens, the one with most tokens first.

    Attributes:
        centroids: `(k, channels)` unit vectors; k may be 0.
        reach: cosine to the first centroid from which a token that is nearest to it belongs to it; -1: all do.
    """

    centroids: Tensor
    reach: float = -1.0

    @classmethod
    def of(cls, centroids: Tensor, label: Tensor) -> Clusters:
        """Those that hold a point, given the centroid of each point `(n,)`.

        >>> Clusters.of(torch.eye(3), torch.tensor([2, 0, 2])).centroids.tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
        """
        size = torch.bincount(label, minlength=len(centroids))
        order = size.argsort(descending=True, stable=True)
        return cls(centroids[order[: int((size > 0).sum())]])


def dense_clusters(points: Tensor, *, least: float, similar: float) -> Clusters:
    """Clusters by density (HDBSCAN) on the unit sphere; points between them belong to none.

    Args:
        points: `(n, channels)`; of many, at most 2,000 in even steps.
        least: share of the points that a cluster holds at least.
        similar: mean cosine of a cluster's points to its centre from which it counts; below, it is a dense place of a
            continuum.

    Returns:
        None at all where no place is dense. `reach` is what nine tenths of the first cluster's points reach.

    >>> copies = torch.eye(4)[:1].repeat(30, 1)
    >>> dense_clusters(torch.cat([copies, torch.eye(4)[1:]]), least=0.5, similar=0.8).centroids.tolist()
    [[1.0, 0.0, 0.0, 0.0]]
    """
    from sklearn.cluster import HDBSCAN

    unit = torch.nn.functional.normalize(points.float(), dim=-1)[:: max(-(-len(points) // SAMPLE), 1)]
    size = max(round(least * len(unit)), 2)
    found: list[tuple[int, Tensor, float]] = []
    if len(unit) > size:
        search = HDBSCAN(min_cluster_size=size, allow_single_cluster=True, copy=True)
        label = torch.from_numpy(search.fit(unit.numpy()).labels_)
        for number in range(int(label.amax()) + 1):
            own = unit[label == number]
            centre = torch.nn.functional.normalize(own.mean(dim=0), dim=-1)
            cosine = own @ centre
            if float(cosine.mean()) >= similar:
                found.append((len(own), centre, float(cosine.quantile(1 - MOST)) - SAME_VECTOR))
    if not found:
        return Clusters(unit[:0])
    found.sort(key=lambda one: -one[0])
    return Clusters(torch.stack([centre for _, centre, _ in found]), found[0][2])


def spherical_kmeans(points: Tensor, k: int, *, seed: int = 0, rounds: int = 50) -> tuple[Tensor, Tensor]:
    """k-means on the unit sphere: centroids `(k, channels)` of length 1, and the centroid of each point `(n,)`.

    Starts from points drawn one after the other with probability ∝ 1 − cosine to the nearest centroid so far
    (k-means++), with `seed`. An emptied centroid moves to the point farthest from its own.

    Raises:
        DartLabError: k outside 1 … number of points.

    >>> centroids, label = spherical_kmeans(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), 2)
    >>> bool(label[0] == label[2]), bool(label[0] == label[1])
    (True, False)
    """
    if not 1 <= k <= len(points):
        raise DartLabError(f"k={k}: give a number from 1 to {len(points)}, the number of points")
    unit = torch.nn.functional.normalize(points.float(), dim=-1)
    generator = torch.Generator().manual_seed(seed)
    first = int(torch.randint(len(unit), (1,), generator=generator))
    chosen = [first]
    nearest = unit @ unit[first]
    while len(chosen) < k:
        weight = (1 - nearest).clamp(min=0).double().cpu()
        if float(weight.sum()) <= 0:
            weight = torch.ones_like(weight)
        chosen.append(int(torch.multinomial(weight, 1, generator=generator)))
        nearest = torch.maximum(nearest, unit @ unit[chosen[-1]])
    centroids = unit[chosen]
    label = torch.full((len(unit),), -1, dtype=torch.int64)
    for _ in range(rounds):
        cosine = unit @ centroids.mT
        new = cosine.argmax(dim=1)
        if torch.equal(new, label):
            break
        label = new
        sums = torch.zeros_like(centroids).index_add_(0, label, unit)
        empty = torch.bincount(label, minlength=k) == 0
        if bool(empty.any()):
            far = cosine.gather(1, label[:, None])[:, 0].argsort(stable=True)[: int(empty.sum())]
            sums[empty] = unit[far]
        centroids = torch.nn.functional.normalize(sums, dim=-1)
    return centroids, label


def nearest_centroid(tokens: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each token and the cosine to it: `(…, channels)`, `(k, channels)` → `(…)` int64, `(…)`.

    >>> nearest_centroid(torch.tensor([[0.0, 3.0]]), torch.eye(2))[0].tolist()
    [1]
    """
    cosine = (
        torch.nn.functional.normalize(tokens.float(), dim=-1)
        @ torch.nn.functional.normalize(centroids.float(), dim=-1).mT
    )
    best = cosine.max(dim=-1)
    return best.indices, best.values


def by_silhouette(points: Tensor, most: int, seed: int) -> Tensor:
    """`(k, channels)` centroids, 1 to `most`: as many as separate best; one where two would split copies of a vector.

    >>> len(by_silhouette(torch.eye(2).repeat(9, 1), most=4, seed=0))
    2
    """
    from sklearn.metrics import silhouette_score

    sample = points[:: max(len(points) // SAMPLE, 1)]
    best, chosen = APART, 1
    for k in range(2, min(most, len(sample) - 1) + 1):
        label = spherical_kmeans(sample, k, seed=seed)[1].numpy()
        if len(np.unique(label)) < 2 or float((sample - sample.mean(dim=0)).norm(dim=1).max()) < SAME_VECTOR:
            continue
        value = float(silhouette_score(sample.numpy(), label, metric="cosine"))
        if value > best:
            best, chosen = value, k
    return spherical_kmeans(points, chosen, seed=seed)[0]
