"""Roles of the visual tokens of one sample: several flags a token, one primary role by precedence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dart_lab.errors import DartLabError, did_you_mean

VIT_SINK, LLM_SINK, DEAD, ALIVE = "vit-sink", "llm-sink", "dead", "alive"
#: In order of precedence: a sink of the vision tower that also spikes in the language model is a ViT sink.
ROLES = (VIT_SINK, LLM_SINK, DEAD, ALIVE)

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenRoles(Mapping[str, Flags]):
    """What each visual token of a sample is for; as a mapping, role → `(n,)` bool by primary role.

    Attributes:
        flags: role → `(n,)` bool for "vit-sink", "llm-sink" and "dead"; a token may have several.
        scores: what the flags were read from, name → `(n,)` float32: "vit norm" (L2 norm of the vision feature),
            "llm energy" (share of the layers in which a sink channel holds the token's energy), "dead cosine" (cosine
            to the nearest dead centroid); those that a rule reads, see `dart_lab.roles.rules`.

    >>> roles = TokenRoles(flags={"vit-sink": [True, False], "llm-sink": [True, False], "dead": [False, False]})
    >>> roles["vit-sink"].tolist(), roles["llm-sink"].tolist(), roles["alive"].tolist()
    ([True, False], [False, False], [False, True])
    """

    flags: Mapping[str, Flags]
    scores: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if tuple(self.flags) != ROLES[:-1]:
            raise DartLabError(f"flags name {list(self.flags)}; give {', '.join(ROLES[:-1])}, in this order")
        flags = {name: np.asarray(flag, dtype=bool) for name, flag in self.flags.items()}
        if len({flag.shape for flag in flags.values()}) != 1:
            raise DartLabError("flags differ in length; give one entry a visual token to each of them")
        object.__setattr__(self, "flags", flags)

    @property
    def primary(self) -> NDArray[np.int64]:
        """`(n,)`: index into `ROLES` of the first role that is flagged, "alive" if none is."""
        held = np.stack([*self.flags.values(), np.ones(self.tokens, dtype=bool)])
        return held.argmax(axis=0)

    @property
    def tokens(self) -> int:
        """Number of visual tokens."""
        return len(self.flags[VIT_SINK])

    def __getitem__(self, role: str) -> Flags:
        if role not in ROLES:
            raise DartLabError(f"unknown role {role!r}. {did_you_mean(role, ROLES)}")
        return np.asarray(self.primary == ROLES.index(role))

    def __iter__(self) -> Iterator[str]:
        return iter(ROLES)

    def __len__(self) -> int:
        return len(ROLES)


def as_groups(roles: Sequence[TokenRoles]) -> dict[str, list[Flags]]:
    """Roles of several samples as `groups` of `AttentionMass`: role → a mask a sample.

    >>> one = TokenRoles(flags={"vit-sink": [True, False], "llm-sink": [False, False], "dead": [False, False]})
    >>> [mask.tolist() for mask in as_groups([one])["alive"]]
    [[False, True]]
    """
    return {role: [one[role] for one in roles] for role in ROLES}


def agreement(labels: Mapping[str, NDArray[np.int64]]) -> pd.DataFrame:
    """How far definitions agree on the same tokens, for every two of them.

    Args:
        labels: name of a definition → `(n,)` label of each token.

    Returns:
        Columns `a`, `b`, `kappa` (Cohen's κ: 1 full agreement, 0 that of chance; NaN where both know one and the same
        label only) and `ari` (adjusted Rand index, which does not care how groups are called).

    Raises:
        DartLabError: fewer than two definitions, or labels of different lengths.

    >>> agreement({"x": np.array([0, 0, 1, 1]), "y": np.array([0, 0, 1, 1])})[["kappa", "ari"]].values.tolist()
    [[1.0, 1.0]]
    """
    from sklearn.metrics import adjusted_rand_score

    if len(labels) < 2 or len({len(label) for label in labels.values()}) != 1:
        raise DartLabError("agreement needs two definitions at least, with one label a token each")
    rows = []
    for a, b in combinations(labels, 2):
        ari = float(adjusted_rand_score(labels[a], labels[b]))
        rows.append({"a": a, "b": b, "kappa": kappa(labels[a], labels[b]), "ari": ari})
    return pd.DataFrame(rows)


def kappa(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Cohen's κ of two labels `(n,)` of the same tokens; NaN where both know one and the same label only.

    >>> kappa(np.array([0, 1, 1]), np.array([0, 1, 1]))
    1.0
    """
    from sklearn.metrics import cohen_kappa_score

    return float("nan") if len(set(a) | set(b)) == 1 else float(cohen_kappa_score(a, b))
