"""Tokens that every picture repeats, against plain loops and planted pools."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from dart_lab.errors import DartLabError
from dart_lab.roles.clusters import nearest_centroid, spherical_kmeans
from dart_lab.roles.dead import foreign_similarity
from dart_lab.roles.histogram import Histogram


def by_loops(tokens: np.ndarray, references: np.ndarray, owner: np.ndarray, image: int, share: float) -> list[float]:
    out = []
    for token in tokens:
        best = []
        for other in sorted(set(owner.tolist()) - {image}):
            table = references[owner == other]
            best.append(max(token @ row / np.linalg.norm(token) / np.linalg.norm(row) for row in table))
        top = sorted(best, reverse=True)[: max(round(share * len(best)), 1)]
        out.append(float(np.mean(top)))
    return out


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_foreign_similarity_is_its_definition(share: float) -> None:
    rng = np.random.default_rng(0)
    tokens, references = rng.normal(size=(9, 6)), rng.normal(size=(40, 6))
    owner = rng.integers(0, 7, 40)
    ours = foreign_similarity(
        torch.tensor(tokens), torch.tensor(references), torch.tensor(owner), 3, shares=(share, 1.0)
    )[:, 0]
    assert np.allclose(ours, by_loops(tokens, references, owner, 3, share), atol=1e-5)


def test_planted_dead_tokens_come_out_exactly_and_the_scale_does_not_matter() -> None:
    """Thirty percent of each picture are one vector with a little noise, the rest is its own."""
    generator = torch.Generator().manual_seed(0)
    pictures, n, width = 20, 40, 64
    dead = torch.randn(width, generator=generator)
    pool = torch.randn(pictures, n, width, generator=generator)
    pool[:, :12] = dead + 0.05 * torch.randn(pictures, 12, width, generator=generator)
    owner = torch.arange(pictures).repeat_interleave(n)
    seen, scores = Histogram(0.01), []
    for image in range(pictures):
        scores.append(foreign_similarity(pool[image] * 3, pool.flatten(0, 1), owner, image)[:, 0])
        seen.add(scores[-1].numpy())
    cut = seen.otsu()
    flagged = torch.stack(scores) > cut
    assert flagged[:, :12].all() and not flagged[:, 12:].any()
    assert seen.valley_depth(cut) > 0.9


def test_a_pool_of_one_picture_says_nothing() -> None:
    with pytest.raises(DartLabError, match="another picture"):
        foreign_similarity(torch.eye(2), torch.eye(2), torch.zeros(2, dtype=torch.int64), 0)
    with pytest.raises(DartLabError, match=r"shares=\[0\]"):
        foreign_similarity(torch.eye(2), torch.eye(2), torch.ones(2, dtype=torch.int64), 0, shares=[0])


def test_kmeans_on_the_sphere_finds_planted_directions() -> None:
    generator = torch.Generator().manual_seed(1)
    centres = torch.nn.functional.normalize(torch.randn(5, 32, generator=generator), dim=-1)
    truth = torch.arange(5).repeat_interleave(60)
    points = (centres[truth] + 0.03 * torch.randn(300, 32, generator=generator)) * torch.rand(
        300, 1, generator=generator
    )
    centroids, label = spherical_kmeans(points, 5, seed=3)
    assert adjusted_rand_score(truth, label) == 1.0
    assert torch.allclose(centroids.norm(dim=-1), torch.ones(5))
    again, _ = spherical_kmeans(points, 5, seed=3)
    assert torch.equal(centroids, again)
    found, cosine = nearest_centroid(points, centroids)
    assert torch.equal(found, label) and float(cosine.min()) > 0.8
    assert len(set(spherical_kmeans(torch.ones(4, 3), 4)[1].tolist())) >= 1  # copies of one point do no harm
    with pytest.raises(DartLabError, match="from 1 to 300"):
        spherical_kmeans(points, 301)
