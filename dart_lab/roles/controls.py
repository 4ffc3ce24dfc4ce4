"""Matched controls: random tokens, as many as a role has, so that an effect of the role is told from one of number.

Roles lie where they lie: a control may also match the number of tokens in each row of the picture.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dart_lab.errors import DartLabError

Match = Literal["size", "rows"]


def matched_control(
    marked: NDArray[np.bool_],
    *,
    among: NDArray[np.bool_] | None = None,
    match: Match = "size",
    row: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> NDArray[np.bool_]:
    """As many random tokens as are marked.

    Args:
        marked: `(n,)` bool, the tokens of a role.
        among: `(n,)` bool, the tokens to draw from. Default: all, marked ones too.
        match: "size" (default): the same number. "rows": the same number in every row of the picture; where a row has
            too few to draw from, the rest comes from the nearest rows.
        row: `(n,)` int64, the row of each token; needed for "rows".
        seed: same seed, same tokens.

    Returns:
        `(n,)` bool; fewer than are marked only if there are fewer to draw from.

    Raises:
        DartLabError: an unknown match, or no rows for "rows".

    >>> control = matched_control(np.array([True, True, False, False, False]), seed=1)
    >>> int(control.sum())
    2
    """
    if match not in ("size", "rows"):
        raise DartLabError(f"match={match!r}: give 'size' or 'rows'")
    pool = np.ones_like(marked) if among is None else among.copy()
    rng = np.random.Generator(np.random.PCG64(seed))
    chance = rng.random(len(marked))
    out = np.zeros(len(marked), dtype=bool)
    if match == "size":
        free = np.flatnonzero(pool)
        out[free[np.argsort(chance[free], kind="stable")][: int(marked.sum())]] = True
        return out
    if row is None:
        raise DartLabError("match='rows' needs the row of every token; give row=tokens.row")
    for token in np.flatnonzero(marked)[np.argsort(chance[marked], kind="stable")]:
        free = np.flatnonzero(pool & ~out)
        if not len(free):
            break
        away = np.abs(row[free] - row[token])
        near = free[away == away.min()]
        out[near[np.argmin(chance[near])]] = True
    return out
