"""`dart-lab figure role-removal`: what is lost with a role of visual tokens, against as many random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.curves import Dots, caption, dots_height, draw_dots, wrapped
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.remove import How, Remove, Where
from dart_lab.roles.controls import Match
from dart_lab.roles.labels import ALIVE, TokenRoles
from dart_lab.studies.comparison import differences
from dart_lab.studies.plan import UNPRUNED
from dart_lab.studies.scores import score_table
from dart_lab.vlm.layout import VisualTokens

from .role_bench import CONTROL_SEEDS, averaged, controls, masks, open_roles
from .sweep import interval, points

SAMPLES = 70
WAYS: tuple[tuple[str, How, Where], ...] = (
    ("dropped at the input", "drop", "input"),
    ("dropped", "drop", "layer"),
    ("made the mean", "mean", "layer"),
    ("made the role's mean", "group-mean", "layer"),
    ("made zero", "zero", "layer"),
)
MATCHES: tuple[tuple[str, Match], ...] = (("as many others", "size"), ("as many others, same rows", "rows"))
#: EmbedLens' removal table (arXiv 2603.00510), LLaVA-1.5-7B, mean over four groups of benchmarks: full, without LLM
#: sinks, ViT sinks, both, dead, and without as many random others. The released script for "dead" removes sinks too.
PUBLISHED = {"full": 52.7, "llm-sink": 52.7, "vit-sink": 52.8, "both sinks": 52.8, "dead": 53.7, "random others": 50.1}


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer every question without each role, in five ways, and without as many random other tokens.

    Args:
        options: `layer` is where tokens go, `n` defaults to 70 questions; `methods` and `keep` are not used.
        progress: show progress bars on stderr.
    """
    found = open_roles(options, n=SAMPLES, progress=progress)
    layer = found.bench.options.layer
    removed = [role for role in found.present if len(found.present) > 1]

    def conditions(
        roles: Sequence[TokenRoles], tokens: Sequence[VisualTokens], numbers: Sequence[int]
    ) -> dict[str, Pruner | None]:
        out: dict[str, Pruner | None] = {UNPRUNED: None}
        for role in removed:
            marked = masks([own[role] for own in roles])
            for label, how, where in WAYS:
                out[f"{role}@{label}"] = Remove(mask=marked, how=how, where=where, layer=layer)
            for label, match in MATCHES:
                for seed in range(CONTROL_SEEDS):
                    drawn = controls(roles, tokens, numbers, role, match=match, seed=seed, others_only=True)
                    out[f"{role}@{label}#{seed}"] = Remove(mask=drawn, layer=layer)
        return out

    records = found.answers(conditions, progress)
    measured = measure(records, removed, seed=found.bench.options.seed)
    return FigureData(records, {**found.facts("role-removal"), **measured})


def measure(records: pd.DataFrame, roles: Sequence[str], *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """Paired differences to the whole picture, for every role and way, and their controls.

    Args:
        records: conditions "unpruned", "role@way" and "role@control#seed".
        roles: what was removed.
        seed: of the bootstrap.
        n_boot: resamples of pictures. Default 1000.

    Returns:
        `unpruned`: value, low, high; `rows`: one a role and way: `gap` to the whole picture with its interval,
        `removed` tokens a picture, `short`: pictures with fewer others than the role has, where the control is smaller.
    """
    labels = [label for label, *_ in WAYS] + [label for label, _ in MATCHES]
    groups = {
        f"{role}@{label}": [c for c in records["condition"].unique() if c.startswith(f"{role}@{label}#")]
        for role in roles for label, _ in MATCHES
    }  # fmt: skip
    table = averaged(records, {name: members for name, members in groups.items() if members})
    whole = interval(score_table(table[table["condition"] == UNPRUNED], seed=seed, n_boot=n_boot).iloc[0])
    rows = []
    plain = table[table["condition"] == UNPRUNED]
    sizes = {role: plain[f"all {role}"] for role in roles}
    visual = sum(plain[name] for name in plain.columns if name.startswith("all "))
    if roles:
        gaps = differences(table, UNPRUNED, seed=seed, n_boot=n_boot, n_perm=1).set_index("condition")
        for role in roles:
            for label in labels:
                row: Any = gaps.loc[f"{role}@{label}"]
                gap = {name: float(row[name]) for name in ("value", "low", "high")}
                rows.append(
                    {
                        "role": role, "way": label, "gap": gap,
                        "removed": float(sizes[role].mean()),
                        "short": float((sizes[role] > visual - sizes[role]).mean()),
                    }
                )  # fmt: skip
    return {"unpruned": whole, "rows": rows, "removed_roles": list(roles), "images": int(records["image_id"].nunique())}


def verdict(facts: Mapping[str, Any]) -> str:
    """One sentence of what follows."""
    said = []
    for role in facts["removed_roles"]:
        own = {row["way"]: row for row in facts["rows"] if row["role"] == role}
        gap, control = own["dropped"]["gap"], own[MATCHES[0][0]]["gap"]
        less = gap["low"] > control["high"]
        more = gap["high"] < control["low"]
        kind = "costs less than" if less else "costs more than" if more else "is not told apart from"
        note = "" if not own["dropped"]["short"] else " (there are fewer others than that in some pictures)"
        said.append(f"dropping {role} {kind} dropping as many others{note}")
    return "; ".join(said) + "." if said else "This model has one role only: nothing can be compared."


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Every row, the published ones beside them, and what follows."""
    out = [*facts["book"], f"unpruned: {100 * facts['unpruned']['value']:.1f} %"]
    for row in facts["rows"]:
        out.append(f"{row['role']} {row['way']}: {points(row['gap'])} points ({row['removed']:.0f} tokens a picture)")
    out.append(
        "LLaVA-1.5-7B (EmbedLens): full 52.7, without dead 53.7, without LLM sinks 52.7, ViT sinks 52.8, both 52.8, "
        "as many random others 50.1"
    )
    return [*out, verdict(facts)]


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """A panel a role, a row a way."""
    roles = facts["removed_roles"] or [ALIVE]
    panels = [
        Dots(
            f"without {role}", "points", {row["way"]: [row["gap"]] for row in facts["rows"] if row["role"] == role},
            (role,), zero=0.0,
        )
        for role in roles
    ]  # fmt: skip
    width, height = 2.3 + 3.1 * len(panels), 1.0 + dots_height(panels[0]) + 1.55
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        1, len(panels), left=2.0 / width, right=0.98, top=1 - 0.75 / height, bottom=1.6 / height, wspace=0.1
    )
    for j, panel in enumerate(panels):
        draw_dots(figure.add_subplot(grid[0, j]), panel, names=j == 0)
    figure.suptitle("Answers without a role of visual tokens", x=0.02, ha="left", y=1 - 0.15 / height)
    rest = (
        f"Paired differences to the whole picture ({100 * facts['unpruned']['value']:.1f} %), before decoder layer "
        f"{facts['layer']} unless said; others: {CONTROL_SEEDS} draws.\n" + wrapped(verdict(facts), 125)
    )
    figure.text(0.02, 0.1 / height, caption(facts, rest), fontsize=7.5, va="bottom")
    return figure


FIGURE = FigureSpec(
    name="role-removal",
    summary="answers without a role of visual tokens, dropped or replaced, beside as many others",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
    roles=True,
)
