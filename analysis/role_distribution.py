"""`dart-lab figure role-distribution`: which roles each method prunes, at several budgets, with accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.curves import caption
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.displays.roles import ROLE_COLOURS, draw_shares
from dart_lab.pruners.base import Pruner
from dart_lab.roles.labels import ROLES, TokenRoles
from dart_lab.studies.bootstrap import bootstrap_sums
from dart_lab.studies.plan import UNPRUNED
from dart_lab.studies.scores import score_table
from dart_lab.vlm.layout import VisualTokens

from .role_bench import before_layer, open_roles
from .sweep import interval

METHODS = ("fastv", "dart", "divprune", "random")
KEEP = (192, 128, 64)
SAMPLES = 70


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer every question with each method and budget, and count the roles of what it prunes.

    Args:
        options: `methods` default to fastv, dart, divprune and random, `keep` to 192, 128 and 64, `n` to 70 questions.
        progress: show progress bars on stderr.
    """
    found = open_roles(options, n=SAMPLES, keep=KEEP, methods=METHODS, progress=progress)
    o = found.bench.options
    pruners: dict[str, Pruner | None] = {UNPRUNED: None}
    for name in o.methods or ():
        for keep in o.keep or ():
            pruners[f"{name}@{keep}"] = before_layer(
                name, keep=int(keep), depth=found.bench.depth, layer=o.layer, seed=o.seed
            )

    def conditions(
        roles: Sequence[TokenRoles], tokens: Sequence[VisualTokens], numbers: Sequence[int]
    ) -> dict[str, Pruner | None]:
        return pruners

    records = found.answers(conditions, progress)
    facts = {**found.facts("role-distribution"), "methods": list(o.methods or ()), "keep": list(o.keep or ())}
    return FigureData(records, {**facts, **measure(records, seed=o.seed)})


def measure(records: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """Shares of the roles among pruned tokens, and the share of each role that is pruned, with intervals.

    Args:
        records: conditions "method@keep" and "unpruned".
        seed: of the bootstrap.
        n_boot: resamples of pictures. Default 1000.

    Returns:
        `rows`: one a condition that prunes: `condition`, `accuracy`, `share` (role → of the pruned tokens), `pruned`
        (role → share of its tokens that go; null where there are none), each value, low, high; `whole`: role → share of
        all visual tokens; `unpruned`: accuracy.
    """
    accuracy = {row["condition"]: interval(row) for _, row in score_table(records, seed=seed, n_boot=n_boot).iterrows()}
    rows = []
    for condition, part in records.groupby("condition", sort=False):
        if condition == UNPRUNED:
            continue
        all_, kept = (part[[f"{kind} {role}" for role in ROLES]].to_numpy(float) for kind in ("all", "kept"))
        gone = all_ - kept
        columns = np.hstack([gone, all_])

        def shares(sums: np.ndarray) -> np.ndarray:
            out, whole = sums[..., : len(ROLES)], sums[..., len(ROLES) :]
            with np.errstate(invalid="ignore", divide="ignore"):
                return np.concatenate([out / out.sum(axis=-1, keepdims=True), out / whole], axis=-1)

        used = columns.sum(axis=0) > 0
        table = bootstrap_sums(columns, part["image_id"].to_numpy(), shares, n_boot=n_boot, seed=seed)
        cells = [{k: float(row[k]) for k in ("value", "low", "high")} for _, row in table.iterrows()]
        rows.append(
            {
                "condition": condition, "accuracy": accuracy[condition],
                "share": {role: cells[i] if used[i + len(ROLES)] else _NOTHING for i, role in enumerate(ROLES)},
                "pruned": {
                    role: cells[i + len(ROLES)] if used[i + len(ROLES)] else None for i, role in enumerate(ROLES)
                },
            }
        )  # fmt: skip
    plain = records[records["condition"] == UNPRUNED][[f"all {role}" for role in ROLES]].to_numpy(float).sum(axis=0)
    return {
        "rows": rows, "whole": dict(zip(ROLES, (plain / plain.sum()).tolist(), strict=True)),
        "unpruned": accuracy[UNPRUNED], "images": int(records["image_id"].nunique()),
    }  # fmt: skip


_NOTHING = {"value": 0.0, "low": 0.0, "high": 0.0}


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Shares and accuracy of every condition."""
    out = [*facts["book"], f"unpruned: {100 * facts['unpruned']['value']:.1f} %"]
    for row in facts["rows"]:
        gone = ", ".join(
            f"{100 * cell['value']:.1f} [{100 * cell['low']:.1f}, {100 * cell['high']:.1f}] % of {role}"
            for role, cell in row["pruned"].items() if cell is not None
        )  # fmt: skip
        out.append(f"{row['condition']}: {100 * row['accuracy']['value']:.1f} % right; pruned {gone}")
    return out


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Stacked shares of what is pruned, one panel a method, the picture's own shares first; accuracy above each bar."""
    methods, budgets = facts["methods"], facts["keep"]
    found = {row["condition"]: row for row in facts["rows"]}
    width, height = 1.0 + 2.1 * len(methods), 4.6
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.65 / width, right=0.98, top=1 - 1.25 / height, bottom=1.45 / height, wspace=0.12)
    for panel, method in zip(axes, methods, strict=True):
        rows = [found[f"{method}@{keep}"] for keep in budgets]
        bars = [facts["whole"], *({role: cell["value"] for role, cell in row["share"].items()} for row in rows)]
        tops = [f"{100 * facts['unpruned']['value']:.0f}", *(f"{100 * row['accuracy']['value']:.0f}" for row in rows)]
        draw_shares(panel, bars, ["all", *map(str, budgets)], tops, facts["roles"])
        panel.set_title(method, pad=16)
        panel.set_xlabel("visual tokens kept")
    axes[0].set_ylabel("share of the pruned tokens (%)")
    handles = [axes[0].patches[0].__class__((0, 0), 1, 1, color=ROLE_COLOURS[role]) for role in facts["roles"]]
    figure.legend(handles, facts["roles"], loc="upper left", bbox_to_anchor=(0.012, 1 - 0.4 / height), ncols=4,
                  frameon=False, fontsize=8)  # fmt: skip
    figure.suptitle("Roles of the tokens that are pruned", x=0.02, ha="left", y=1 - 0.15 / height)
    rest = (
        "'all': every visual token of the picture. Above the bars: right answers in percent. All methods cut before "
        f"decoder layer {facts['layer']}.\nRoles depend on where tokens lie and on what the picture is like; which "
        "tokens a method prunes does not say why."
    )
    figure.text(0.02, 0.1 / height, caption(facts, rest), fontsize=7.5, va="bottom")
    return figure


FIGURE = FigureSpec(
    name="role-distribution",
    summary="which roles of visual tokens each method prunes, at several budgets, with accuracy",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
    roles=True,
)
