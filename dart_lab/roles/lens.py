"""EmbedLens: which rows of the vocabulary a token lies nearest to, at any layer (arXiv 2603.00510)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from dart_lab.errors import DartLabError


@dataclass(frozen=True, eq=False, kw_only=True)
class Neighbours:
    """The vocabulary ids nearest to each token, best first.

    `ids` `(…, k)` int64; `similarity` `(…, k)` float32 cosines; `margin` `(…,)` float32, how far the last of the k is
    ahead of the next one (0: a tie decided by the lower id; infinite if there is no next one).
    """

    ids: Tensor
    similarity: Tensor
    margin: Tensor

    def any_of(self, targets: Collection[int], *, top: int | None = None) -> Tensor:
        """`(…,)` bool: True where one of the first `top` ids (None: all k) is among `targets`.

        The released rule: a token plays a role if any of its 3 nearest ids is one of the role's.

        >>> found = nearest_ids(torch.eye(4)[None, :2], torch.eye(4), k=1)
        >>> found.any_of([1, 3])
        tensor([[False,  True]])
        """
        wanted = torch.tensor(sorted(targets), dtype=torch.int64, device=self.ids.device)
        return torch.isin(self.ids[..., :top], wanted).any(dim=-1)


def nearest_ids(
    states: Tensor,
    table: Tensor,
    *,
    k: int = 10,
    centred: bool = False,
    hubness: Tensor | None = None,
    rows_at_once: int = 8192,
) -> Neighbours:
    """Nearest rows of an embedding table by cosine.

    Args:
        states: `(…, channels)`, tokens at any layer.
        table: `(vocabulary, channels)`, rows of the language model's input embeddings.
        k: how many. Default 10.
        centred: subtract the table's mean row from table and states first, which takes away a direction common to all
            rows. Default False, as in the released code.
        hubness: `(vocabulary,)` from `table_hubness`: rank by CSLS, cos − hubness / 2 (half of Lample et al. 2018's
            2 cos − r(token) − r(row), whose r(token) changes no ranking), so that rows which are near to everything
            lose their lead. `similarity` and `margin` are then in that unit. Default: plain cosines.
        rows_at_once: vocabulary rows whose cosines are in memory together.

    Raises:
        DartLabError: k outside 1 … vocabulary, or states and table of different widths.

    >>> nearest_ids(torch.tensor([[0.0, 2.0]]), torch.eye(2), k=1).ids
    tensor([[1]])
    """
    if states.shape[-1] != table.shape[-1]:
        raise DartLabError(
            f"states have {states.shape[-1]} channels and the table {table.shape[-1]}; give states of the same model"
        )
    if not 1 <= k <= len(table):
        raise DartLabError(f"k={k}: give a number from 1 to {len(table)}, the size of the vocabulary")
    flat, rows = states.reshape(-1, states.shape[-1]).float(), table.float()
    if centred:
        mean = rows.mean(dim=0)
        flat, rows = flat - mean, rows - mean
    flat = torch.nn.functional.normalize(flat, dim=-1)
    if hubness is not None and hubness.shape != (len(rows),):
        raise DartLabError(f"hubness has shape {tuple(hubness.shape)}; expected ({len(rows)},), one number a row")
    wanted = min(k + 1, len(rows))
    best = flat.new_empty(len(flat), 0)
    ids = torch.empty(len(flat), 0, dtype=torch.int64, device=flat.device)
    for start in range(0, len(rows), rows_at_once):
        block = torch.nn.functional.normalize(rows[start : start + rows_at_once], dim=-1)
        cosine = flat @ block.mT
        if hubness is not None:
            cosine = cosine - hubness[start : start + len(block)].to(cosine) / 2
        best = torch.cat([best, cosine], dim=1)
        ids = torch.cat([ids, torch.arange(start, start + len(block), device=ids.device).expand(len(flat), -1)], dim=1)
        order = best.argsort(dim=1, descending=True, stable=True)[:, :wanted]  # ties go to earlier ids
        best, ids = best.gather(1, order), ids.gather(1, order)
    margin = best[:, k - 1] - best[:, k] if wanted > k else torch.full_like(best[:, 0], float("inf"))
    shape = states.shape[:-1]
    return Neighbours(
        ids=ids[:, :k].reshape(*shape, k), similarity=best[:, :k].reshape(*shape, k), margin=margin.reshape(shape)
    )


def table_hubness(table: Tensor, pool: Tensor, *, k: int = 10, rows_at_once: int = 8192) -> Tensor:
    """How near each vocabulary row is to a pool of tokens: mean cosine to its `k` nearest ones, `(vocabulary,)`.

    Args:
        table: `(vocabulary, channels)`.
        pool: `(n, channels)`, visual tokens of many pictures.
        k: neighbours. Default 10; fewer if the pool is smaller.
        rows_at_once: vocabulary rows whose cosines are in memory together.

    Raises:
        DartLabError: an empty pool, or widths that differ.

    >>> table_hubness(torch.eye(2), torch.tensor([[1.0, 0.0], [2.0, 0.0]]), k=2)
    tensor([1., 0.])
    """
    if not len(pool) or pool.shape[-1] != table.shape[-1]:
        raise DartLabError(f"the pool has shape {tuple(pool.shape)}; expected (n, {table.shape[-1]}) with n ≥ 1")
    unit = torch.nn.functional.normalize(pool.float(), dim=-1)
    parts = []
    for rows in table.float().split(rows_at_once):
        cosine = torch.nn.functional.normalize(rows, dim=-1) @ unit.mT
        parts.append(cosine.topk(min(k, len(unit)), dim=1).values.mean(dim=1))
    return torch.cat(parts)


def ids_covering(ids: Tensor, share: float = 0.9) -> int:
    """How many different ids it takes to name `share` of the tokens: few of them means hubs, not meanings.

    Args:
        ids: `(n,)` int64, the nearest id of each token.
        share: of the tokens. Default 0.9.

    >>> ids_covering(torch.tensor([7, 7, 7, 7, 7, 7, 7, 7, 7, 3]))
    1
    """
    counts = torch.bincount(ids.flatten()).sort(descending=True).values
    return int((counts.cumsum(dim=0) < share * ids.numel()).sum()) + 1
