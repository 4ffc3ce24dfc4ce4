"""Group-level attention mass: how much attention each group of tokens pays to each other one, layer by layer.

With post-softmax attention A of one head, whose rows sum to 1 over the visible keys, and groups G (queries), H (keys):

* mass M(G→H) = mean over q ∈ G of Σ_{k ∈ H} A[q, k]; for every G, Σ_H M(G→H) = 1;
* pairwise score P(G→H) = Σ_{q ∈ G, k ∈ H} A[q, k] / number of visible pairs.

Mass asks how much a group gets as a whole, the pairwise score how much one token of it gets. Papers differ in the query
set, in renormalisation and in layers, so that all three are part of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dart_lab.errors import DartLabError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

BOS, BEFORE, VISUAL, AFTER, GENERATED = "bos", "before", "visual", "after", "generated"
#: The query set of one token: the last of the prompt, or the newest one of a decode step (FastV's row).
LAST = "last"
OUTSIDE = -1  # padding and empty slots: in no group

Groups = Mapping[str, Sequence[ArrayLike]]


@dataclass(frozen=True, kw_only=True)
class AttentionMass:
    """What to record.

    Args:
        groups: name → for each sample the visual tokens (numbers within its visual tokens) that belong to it, for
            example the roles of a rolebook; or a function of a sample that returns name → numbers. Tokens that no group
            names stay in "visual". Default: no groups but the fixed ones: "bos" (the first real token), "before" and
            "after" (text), "visual", and "generated" (everything after the prompt).
        layers: decoder layers. Default: all.
        renormalise: names of groups. Each query's mass is divided by what it pays to these groups together; mass on
            other groups becomes NaN. Default: none, rows sum to 1 over all keys.

    Raises:
        DartLabError: a group that takes the name of a fixed one, or names in `renormalise` that are no groups.

    >>> AttentionMass(groups={"dead": [[0, 1]]}).names
    ('bos', 'before', 'dead', 'visual', 'after', 'generated')
    """

    groups: Groups | Callable[[Any], Mapping[str, ArrayLike]] | None = None
    layers: Sequence[int] | None = None
    renormalise: tuple[str, ...] | None = None
    own: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and not all(isinstance(layer, Integral) for layer in self.layers):
            raise DartLabError(f"layers={self.layers!r}: give whole numbers of decoder layers, such as [1, 4]")
        if not (self.groups is None or callable(self.groups) or isinstance(self.groups, Mapping)):
            raise DartLabError(
                f"groups={self.groups!r}: give name → for each sample its visual tokens, such as {{'dead': [[0, 1]]}}, "
                "or a function of a sample"
            )
        if callable(self.groups) and self.own is None:
            raise DartLabError("groups is a function: say in own=(…) which names it returns, in their order")
        fixed = (BOS, BEFORE, VISUAL, AFTER, GENERATED, LAST)
        clash = [name for name in self._own if name in fixed]
        if clash:
            raise DartLabError(f"group {clash[0]!r} has the name of a fixed group; give it another one")
        for name in self.renormalise or ():
            if name not in self.names:
                raise DartLabError(f"renormalise: no group {name!r}. {did_you_mean(name, self.names)}")

    @property
    def _own(self) -> tuple[str, ...]:
        return self.own if callable(self.groups) and self.own else tuple(self.groups or ())  # type: ignore[arg-type]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all groups, in the order of the record's axes."""
        return (BOS, BEFORE, *self._own, VISUAL, AFTER, GENERATED)

    def members(self, sample: Any, number: int, tokens: int) -> np.ndarray:
        """`(tokens,)` int64: the group of each of a sample's visual tokens, as an index into `names`.

        Raises `DartLabError` for a token in two groups, a number out of range, or groups that lack this sample.
        """
        label = np.full(tokens, self.names.index(VISUAL), dtype=np.int64)
        taken = np.zeros(tokens, dtype=bool)
        given: Mapping[str, Any] = {}
        if callable(self.groups):
            given = self.groups(sample)
        elif self.groups is not None:
            if any(number >= len(each) for each in self.groups.values()):
                short = min(len(each) for each in self.groups.values())
                raise DartLabError(f"groups are given for {short} samples, but sample {number + 1} came; name them all")
            given = {name: each[number] for name, each in self.groups.items()}
        for name, found in given.items():
            if name not in self._own:
                raise DartLabError(
                    f"groups returned {name!r}, which own does not name. {did_you_mean(name, self._own)}"
                )
            index = np.asarray(found)
            index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
            if len(index) and (index.min() < 0 or index.max() >= tokens):
                raise DartLabError(
                    f"group {name!r} has token {index.max()}, the sample has visual tokens 0 to {tokens - 1}"
                )
            if taken[index].any():
                raise DartLabError(
                    f"a token of group {name!r} is in another group too; give each its primary group, "
                    "so that masses add up"
                )
            taken[index], label[index] = True, self.names.index(name)
        return label


@dataclass(eq=False)
class Pass:
    """Masses of one forward pass.

    Attributes:
        step: 0 for a prompt, then 1, 2 … for the passes after it.
        samples: the sample of each row of the batch.
        token_ids: `(batch, queries)` token ids of the pass before any dropping; None where they are not known.
        layers: layer → (`mass`, `pairwise`, `queries`, `visible`): `(batch, heads, query sets, groups)` float32 twice,
            `(batch, query sets)` and `(batch, query sets, groups)` int64 counts.
    """

    step: int
    samples: list[int]
    token_ids: np.ndarray | None
    layers: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)


@dataclass(eq=False)
class MassTrace:
    """All masses that a block recorded; axes `(step, layer, head, query set, group)`.

    Attributes:
        spec: what was asked for.
        passes: one entry a forward pass, in order.
        backend: the attention kernel of the model.
    """

    spec: AttentionMass
    backend: str
    passes: list[Pass] = field(default_factory=list)

    @property
    def queries(self) -> tuple[str, ...]:
        """Names of the query sets: every group, and "last"."""
        return (*self.spec.names, LAST)

    def table(self, *, heads: bool = False) -> pd.DataFrame:
        """One row a sample, step, layer (and head), query set and group; query sets without a token are left out.

        Args:
            heads: keep heads apart. Default: their mean.

        Returns:
            Columns `sample`, `row` (of the batch), `step`, `layer`, (`head`,) `query`, `key`, `mass`, `pairwise`
            (NaN where no pair is visible), `queries` (tokens of the query set), `keys` (mean number of tokens of the
            group that a query sees).
        """
        import pandas as pd

        parts = [
            _rows(each, layer, values, self.queries, self.spec.names, heads)
            for each in self.passes
            for layer, values in sorted(each.layers.items())
        ]
        columns = ["sample", "row", "step", "layer", *(["head"] if heads else []), "query", "key"]
        columns += ["mass", "pairwise", "queries", "keys"]
        return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def _rows(
    each: Pass, layer: int, values: tuple[np.ndarray, ...], queries: Sequence[str], names: Sequence[str], heads: bool
) -> pd.DataFrame:
    import pandas as pd

    mass, pairwise, count, visible = values
    if not heads:
        mass, pairwise = mass.mean(axis=1, keepdims=True), pairwise.mean(axis=1, keepdims=True)
    row, head, query, key = (axis.ravel() for axis in np.indices(mass.shape))
    out = pd.DataFrame(
        {
            "sample": np.asarray(each.samples)[row],
            "row": row,
            "step": each.step,
            "layer": layer,
            "head": head,
            "query": np.asarray(queries)[query],
            "key": np.asarray(names)[key],
            "mass": mass.ravel(),
            "pairwise": pairwise.ravel(),
            "queries": count[row, query],
            "keys": visible[row, query, key] / np.maximum(count[row, query], 1),
        }
    )
    return out[out["queries"] > 0]


def group_mass(
    attend: Callable[[Tensor], Tensor],
    query_group: Tensor,
    key_group: Tensor,
    groups: int,
    *,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    renormalise: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mass and pairwise score of one attention call, exact and without the queries × keys matrix.

    The kernel is called once more with group indicators for values: softmax(q kᵀ)·onehot is, for every head and query,
    the mass on each group, in the memory of one attention output.

    Args:
        attend: values `(batch, kv_heads, keys, head_dim)` → attention output `(batch, queries, heads, head_dim)`.
        query_group: `(batch, queries)` int64, −1: in no group. The queries are the last of the keys.
        key_group: `(batch, keys)` int64, −1: in no group.
        groups: number of groups.
        shape: kv_heads, keys (slots of a static cache included) and head_dim of the call.
        dtype: of its values.
        renormalise: groups whose masses shall sum to 1 for each query.

    Returns:
        mass and pairwise score `(batch, heads, groups + 1, groups)` float32, the last query set being the last query;
        queries `(batch, groups + 1)` and visible pairs `(batch, groups + 1, groups)` int64.
    """
    kv_heads, keys, width = shape
    count = query_group.shape[1]
    seen = _onehot(torch.nn.functional.pad(key_group, (0, keys - key_group.shape[1]), value=OUTSIDE), groups)
    parts = []
    for start in range(0, groups, width):
        values = torch.nn.functional.pad(seen[:, :, start : start + width], (0, max(width - (groups - start), 0)))
        values = values[:, None].expand(-1, kv_heads, -1, -1).to(dtype)
        parts.append(attend(values)[..., : min(width, groups - start)].float())
    mass = torch.cat(parts, dim=-1)  # (batch, queries, heads, groups)
    if renormalise is not None:
        inside = torch.zeros(groups, dtype=torch.bool, device=mass.device)
        inside[list(renormalise)] = True
        whole = mass[..., inside].sum(dim=-1, keepdim=True)
        mass = (mass / whole).masked_fill(~inside, float("nan"))
    sets = _onehot(query_group, groups)
    last = torch.zeros_like(sets[:, :, :1])
    last[:, -1] = 1
    sets = torch.cat([sets, last], dim=-1)  # (batch, queries, query sets)
    number = sets.sum(dim=1)
    total = torch.einsum("bqs,bqhg->bhsg", sets, mass.nan_to_num(nan=0.0))
    if renormalise is not None:
        total = total.masked_fill(~inside, float("nan"))
    sees = seen[:, : key_group.shape[1]].cumsum(dim=1)[:, key_group.shape[1] - count :]
    visible = torch.einsum("bqs,bqg->bsg", sets.double(), sees.double()).long()
    return (
        total / number.clamp(min=1)[:, None, :, None],
        total / visible[:, None],
        number.long(),
        visible,
    )


def _onehot(group: Tensor, groups: int) -> Tensor:
    """`(batch, n)` int64 with −1 for none → `(batch, n, groups)` float32."""
    index = group.where(group != OUTSIDE, groups)
    return torch.nn.functional.one_hot(index, groups + 1)[..., :groups].float()
