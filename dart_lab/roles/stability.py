"""How far rolebooks of one model agree: another pool, another seed or half of the pictures should change little."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dart_lab.errors import DartLabError
from dart_lab.roles.labels import ROLES, kappa
from dart_lab.roles.pool import Pool, Survey
from dart_lab.roles.rolebook import Rolebook


def book_agreement(vlm: Any, books: Mapping[str, Rolebook], pool: Pool, *, batch: int = 8) -> pd.DataFrame:
    """Cohen's κ between the roles that rolebooks give to every visual token of the same pictures.

    Args:
        vlm: the model of all the books.
        books: name → book, two at least.
        pool: pictures; choose some that no book was fitted on.
        batch: pictures in one pass. Default 8.

    Returns:
        One row for every two books and `role`: "all" (the primary role of four) or one role against the rest; `kappa`
        (NaN where neither book knows two groups), `tokens`, and `a share`, `b share`, what each calls so.

    Raises:
        DartLabError: fewer than two books, or a picture that cannot be opened.
    """
    if len(books) < 2:
        raise DartLabError(f"{len(books)} rolebooks: agreement needs two at least")
    labels: dict[str, list[NDArray[np.int64]]] = {name: [] for name in books}
    for start in range(0, len(pool), batch):
        pictures = [pool[number] for number in range(start, min(start + batch, len(pool)))]
        inputs = vlm.prepare(pictures, [Survey.question] * len(pictures))
        for name, book in books.items():
            labels[name] += [roles.primary for roles in book.assign(vlm, inputs)]
    joined = {name: np.concatenate(parts) for name, parts in labels.items()}
    rows = []
    for a, b in combinations(joined, 2):
        rows.append({"a": a, "b": b, "role": "all", "kappa": kappa(joined[a], joined[b]), "tokens": len(joined[a])})
        for place, role in enumerate(ROLES):
            one, two = joined[a] == place, joined[b] == place
            rows.append({"a": a, "b": b, "role": role, "kappa": kappa(one, two), "tokens": len(one),
                         "a share": float(one.mean()), "b share": float(two.mean())})  # fmt: skip
    return pd.DataFrame(rows)
