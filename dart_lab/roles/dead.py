"""Dead tokens: vectors that come back in every picture, and the centroids by which they are known again."""

from __future__ import annotations

import torch
from torch import Tensor

from dart_lab.errors import DartLabError


def foreign_similarity(
    tokens: Tensor, references: Tensor, owner: Tensor, image: int, *, share: float = 0.2, rows_at_once: int = 4096
) -> Tensor:
    """How faithfully other pictures repeat a token; near 1, the same vector is everywhere and tells nothing.

    For every other picture of the references, the largest cosine to one of its tokens; then the mean over the `share`
    of pictures with the largest values.

    Args:
        tokens: `(n, channels)`, one picture's tokens as they enter the language model.
        references: `(r, channels)`, tokens of the reference pictures.
        owner: `(r,)` int64, which picture each of them is from.
        image: the picture that the tokens are from; its own references are left out.
        share: share of the pictures that must repeat the token. Default 0.2.
        rows_at_once: tokens compared at once.

    Returns:
        `(n,)` float32.

    Raises:
        DartLabError: no reference from another picture, or a share outside (0, 1].

    >>> foreign_similarity(torch.eye(2), torch.eye(2)[:1], torch.tensor([9]), image=0)
    tensor([1., 0.])
    """
    if not 0 < share <= 1:
        raise DartLabError(f"share={share}: give a number above 0 and at most 1")
    others = owner != image
    if not bool(others.any()):
        raise DartLabError("there is no reference token from another picture; give a pool of two pictures at least")
    table = torch.nn.functional.normalize(references[others].float(), dim=-1)
    code = torch.unique(owner[others], return_inverse=True)[1]
    pictures = int(code.max()) + 1
    best = max(round(share * pictures), 1)
    parts = []
    for rows in torch.nn.functional.normalize(tokens.float(), dim=-1).split(rows_at_once):
        cosine = rows @ table.mT
        nearest = cosine.new_full((len(rows), pictures), -1.0)
        nearest.scatter_reduce_(1, code.expand(len(rows), -1), cosine, reduce="amax")
        parts.append(nearest.topk(best, dim=1).values.mean(dim=1))
    return torch.cat(parts) if parts else tokens.new_zeros(0)


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
