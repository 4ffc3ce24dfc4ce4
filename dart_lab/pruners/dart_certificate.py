"""What can be proved about a set that DART kept, measured on the tensors it was chosen from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dart_lab.pruners.reduction import mask_to_rows
from dart_lab.pruners.signals import gather_tokens

EQUAL_NORM_TOLERANCE = 1e-3  # relative spread of norms below which the Lemma's hidden assumption counts as met


def duplication_margin(duplication: Tensor, epsilon: Tensor, pruned: Tensor) -> Tensor:
    """`(batch,)`: smallest dup(p_i, x) − ε_i over pruned tokens x and pivots p_i; +inf if nothing was pruned.

    A pruned token was in the pool in every round, so no pivot found it less similar than what it took: the margin is
    never negative. This is what the greedy code guarantees in place of the paper's threshold sets.

    Args:
        duplication: `(batch, pivots, n)` cosine similarities.
        epsilon: `(batch, pivots)`, NaN where a row has fewer pivots.
        pruned: `(batch, n)` bool.

    >>> similarity, epsilon = torch.tensor([[[0.9, 0.1, 0.5]]]), torch.tensor([[0.1]])
    >>> duplication_margin(similarity, epsilon, torch.tensor([[True, False, True]]))
    tensor([0.4000])
    """
    counted = pruned[:, None, :] & ~epsilon.isnan()[:, :, None]
    margin = torch.where(counted, duplication - epsilon[:, :, None], math.inf)
    return margin.flatten(1).amin(dim=1) if margin[0].numel() else margin.new_full((len(margin),), math.inf)


def covering(tokens: Tensor, kept: Tensor, pruned: Tensor, pivots: Tensor, epsilon: Tensor) -> dict[str, Tensor]:
    """How far pruned tokens are from what stays, and the bound of the paper's Lemmas 1 and 2 (arXiv 2502.11494, §3).

    The Lemmas bound the distance by √(2(1−ε))·B for ‖x‖ ≤ B. That does not follow from ‖x‖ ≤ B alone: x = 0.01·p has
    cosine 1 with p and distance 0.99·B. It holds where all norms are equal, which is reported beside it.

    Args:
        tokens: `(batch, n, channels)` float32, the representation that was compared.
        kept, pruned: `(batch, n)` bool.
        pivots: `(batch, p, channels)` float32.
        epsilon: `(batch, p)`, NaN where a row has fewer pivots.

    Returns:
        `(batch,)` tensors: `hausdorff` (from visual tokens to the kept ones and the pivots, the paper's R),
        `hausdorff_visual` (to the kept visual tokens alone), `bound`, `equal_norms` (bool).
    """
    real = ~epsilon.isnan()
    lost = mask_to_rows(pruned)
    there = lost >= 0
    x, r = gather_tokens(tokens, lost), gather_tokens(tokens, mask_to_rows(kept))
    r_real = mask_to_rows(kept) >= 0
    to_kept, to_pivot = nearest_distance(x, r, r_real), nearest_distance(x, pivots, real)

    def farthest(distance: Tensor) -> Tensor:
        none = distance.new_zeros(len(distance), 1)
        return torch.cat([torch.where(there, distance, 0.0), none], dim=1).amax(dim=1)

    norms = torch.cat([torch.linalg.vector_norm(t, dim=-1) for t in (tokens, pivots)], dim=1)
    counted = torch.cat([kept | pruned, real], dim=1)
    largest = torch.where(counted, norms, 0.0).amax(dim=1)
    smallest = torch.where(counted, norms, math.inf).amin(dim=1)
    best = epsilon.nan_to_num(nan=-1.0).amax(dim=1)
    return {
        "hausdorff": farthest(torch.minimum(to_kept, to_pivot)),
        "hausdorff_visual": farthest(to_kept),
        "bound": (2 * (1 - best)).clamp(min=0).sqrt() * largest,
        "equal_norms": largest - smallest <= EQUAL_NORM_TOLERANCE * largest,
    }


def nearest_distance(x: Tensor, others: Tensor, real: Tensor) -> Tensor:
    """Euclidean distance `(batch, m)` from x `(batch, m, c)` to the nearest real of others `(batch, k, c)`.

    The nearest one is found by a matrix product; its distance is then computed from the difference, which keeps
    small distances exact. +inf where a row has no others.
    """
    if not others.shape[1]:
        return x.new_full(x.shape[:2], math.inf)
    closeness = 2 * x @ others.mT - others.square().sum(dim=-1)[:, None, :]
    nearest = torch.where(real[:, None, :], closeness, -math.inf).argmax(dim=2)
    distance = torch.linalg.vector_norm(x - gather_tokens(others, nearest), dim=-1)
    return torch.where(real.any(dim=1)[:, None], distance, math.inf)
