"""Foreign similarity: dead tokens are vectors that come back in every picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dart_lab.errors import DartLabError


def nearest_in_each(tokens: Tensor, references: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Largest cosine of every token to a token of each reference picture.

    Args:
        tokens: `(n, channels)`.
        references: `(r, channels)`.
        owner: `(r,)` int64, which picture each reference is from.

    Returns:
        `(n, pictures)` float32, and the pictures `(pictures,)` int64, ascending.

    >>> nearest_in_each(torch.eye(2), torch.eye(2), torch.tensor([4, 7]))
    (tensor([[1., 0.],
            [0., 1.]]), tensor([4, 7]))
    """
    unit = torch.nn.functional.normalize(tokens.float(), dim=-1)
    table = torch.nn.functional.normalize(references.float(), dim=-1)
    pictures = owner.unique()
    best = unit.new_empty(len(unit), len(pictures))
    for column, picture in enumerate(pictures.tolist()):  # one at a time: no tokens × references matrix
        best[:, column] = (unit @ table[owner == picture].mT).amax(dim=1)
    return best, pictures


def foreign_similarity(
    tokens: Tensor, references: Tensor, owner: Tensor, image: int, *, shares: Sequence[float] = (0.2,)
) -> Tensor:
    """How faithfully other pictures repeat a token; near 1, the same vector is everywhere and tells nothing.

    For every other picture of the references, the largest cosine to one of its tokens; then the mean over that share
    of the pictures that has the largest values.

    Args:
        tokens: `(n, channels)`, one picture's tokens as they enter the language model.
        references: `(r, channels)`, tokens of the reference pictures.
        owner: `(r,)` int64, which picture each of them is from.
        image: the picture that the tokens are from; its own references are left out.
        shares: shares of the pictures that must repeat the token. Default one, 0.2.

    Returns:
        `(n, shares)` float32.

    Raises:
        DartLabError: no reference from another picture, or a share outside (0, 1].

    >>> foreign_similarity(torch.eye(2), torch.eye(2)[:1], torch.tensor([9]), image=0)
    tensor([[1.],
            [0.]])
    """
    if any(not 0 < share <= 1 for share in shares):
        raise DartLabError(f"shares={list(shares)}: give numbers above 0 and at most 1")
    others = owner != image
    if not bool(others.any()):
        raise DartLabError("there is no reference token from another picture; give a pool of two pictures at least")
    best = nearest_in_each(tokens, references[others], owner[others])[0].sort(dim=1, descending=True).values
    return torch.stack([best[:, : max(round(share * best.shape[1]), 1)].mean(dim=1) for share in shares], dim=1)
