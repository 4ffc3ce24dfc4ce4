"""How far the definitions of one role agree on the same tokens: two papers may mean different tokens by one word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dart_lab.errors import DartLabError
from dart_lab.roles.labels import agreement
from dart_lab.roles.pool import Pool, Survey
from dart_lab.roles.rolebook import Rolebook
from dart_lab.roles.rule import EFFECT, VOCABULARY
from dart_lab.roles.rules import RULES, rule_of


def rule_agreement(
    vlm: Any, book: Rolebook, pool: Pool, role: str, rules: Sequence[str] | None = None, *, batch: int = 8
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Cohen's κ and the adjusted Rand index between definitions of one role, on every visual token of some pictures.

    Args:
        vlm: the book's model.
        book: which tells the pool's cuts, centroids and channels.
        pool: pictures; choose some that the book was not fitted on.
        role: "vit-sink", "llm-sink" or "dead".
        rules: names of its rules, two at least. Default: all but those that run the model once for each token.
        batch: pictures in one pass. Default 8.

    Returns:
        One row for every two rules: `a`, `b`, `kappa` (NaN where both flag none or all), `ari`, `tokens`, and
        `a share`, `b share`, what each flags; and why rules were left out, name → reason.

    Raises:
        DartLabError: an unknown role or rule, fewer than two rules that this model can serve, or a picture that cannot
            be opened.
    """
    rule_of(role, "none")
    wanted = {name: rule_of(role, name) for name in rules or RULES[role]}
    left_out = {} if rules else {name: "runs the model once for each token; name it to have it"
                                 for name, rule in wanted.items() if EFFECT in rule.needs}  # fmt: skip
    flags: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in wanted}
    if any(VOCABULARY in rule.needs for rule in wanted.values()):
        book = book.with_table(vlm)
    for start in range(0, len(pool), batch):
        pictures = [pool[number] for number in range(start, min(start + batch, len(pool)))]
        inputs = vlm.prepare(pictures, [Survey.question] * len(pictures))
        used = {name: rule for name, rule in wanted.items() if name not in left_out}
        found = book.states(vlm, inputs, list(used.values()))
        for name, rule in used.items():
            try:
                flags[name] += [rule.flags(book, one)[0].cpu().numpy() for one in found]
            except DartLabError as error:
                left_out[name] = str(error)
    joined = {name: np.concatenate(parts) for name, parts in flags.items() if name not in left_out}
    if len(joined) < 2:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise DartLabError(f"{len(joined)} rules for {role} can be used here, agreement needs two. {why}".strip())
    table = agreement({name: own.astype(np.int64) for name, own in joined.items()})
    shares = {name: float(own.mean()) for name, own in joined.items()}
    table["tokens"] = len(next(iter(joined.values())))
    table["a share"], table["b share"] = table["a"].map(shares), table["b"].map(shares)
    return table, left_out
