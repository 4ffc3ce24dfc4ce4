"""`dart-lab figure role-protection`: what it helps to protect a role, against protecting as many random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from dart_lab.displays.curves import Dots, caption, dots_height, dots_legend, draw_dots, wrapped
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.protect import Protect
from dart_lab.roles.labels import TokenRoles
from dart_lab.studies.comparison import differences, holm
from dart_lab.studies.plan import UNPRUNED
from dart_lab.studies.scores import score_table
from dart_lab.vlm.layout import VisualTokens

from .role_bench import CONTROL_SEEDS, averaged, before_layer, controls, masks, open_roles
from .sweep import interval, points

METHODS = ("fastv", "dart", "divprune", "random")
SAMPLES = 70
HALF = 2  # the default budget is the visual tokens over this, as in 2608.04483
ALPHA = 0.05
#: Protecting a role at half of the tokens, average over ten benchmarks on LLaVA-1.5-7B, in percent of the unpruned
#: score: gain over the plain method (arXiv 2608.04483, Table 1, from a digest).
PUBLISHED = {("fastv", "alive"): 1.14, ("dart", "alive"): 1.26, ("divprune", "alive"): 1.25, ("divprune", "dead"): 0.93}


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer every question with each method, with a role protected, and with as many random tokens protected.

    Args:
        options: `methods` default to fastv, dart, divprune and random, `keep` to half of the visual tokens, `n` to 70
            questions; `rolebook` to one fitted on other pictures of the same data.
        progress: show progress bars on stderr.
    """
    found = open_roles(options, n=SAMPLES, methods=METHODS, progress=progress)
    o, depth = found.bench.options, found.bench.depth
    keeps = [int(keep) for keep in o.keep or (depth.visual // HALF,)]
    methods = tuple(o.methods or METHODS)
    protected = [role for role in found.present if len(found.present) > 1]

    def conditions(
        roles: Sequence[TokenRoles], tokens: Sequence[VisualTokens], numbers: Sequence[int]
    ) -> dict[str, Pruner | None]:
        out: dict[str, Pruner | None] = {UNPRUNED: None}
        for keep in keeps:
            for name in methods:
                plain = before_layer(name, keep=keep, depth=depth, layer=o.layer, seed=o.seed)
                out[f"{name}@{keep}"] = plain
                for role in protected:
                    marked = masks([own[role] for own in roles])
                    out[f"{name}@{keep}+{role}"] = Protect(plain, mask=marked)
                    for seed in range(CONTROL_SEEDS):
                        drawn = controls(roles, tokens, numbers, role, match="size", seed=seed, others_only=False)
                        out[f"{name}@{keep}+as many as {role}#{seed}"] = Protect(plain, mask=drawn)
        return out

    records = found.answers(conditions, progress)
    facts = {**found.facts("role-protection"), "keep": keeps, "methods": list(methods), "protected": protected}
    return FigureData(records, {**facts, **measure(records, methods, keeps, protected, seed=o.seed)})


def measure(
    records: pd.DataFrame, methods: Sequence[str], keeps: Sequence[int], roles: Sequence[str], *, seed: int = 0,
    n_boot: int = 1000, n_perm: int = 1999,
) -> dict[str, Any]:  # fmt: skip
    """Paired gains of protection over the plain method and over its controls.

    Args:
        records: conditions "method@keep", "method@keep+role" and "method@keep+as many as role#seed".
        methods, keeps, roles: what was run.
        seed: of bootstrap and permutations.
        n_boot: resamples of pictures. Default 1000.
        n_perm: permutations. Default 1999.

    Returns:
        `accuracy`: condition → value, low, high; `cells`: one entry a method, budget and role: `gain` over the plain
        method, `control_gain` of its controls, `over_control`, each value, low, high, p (and `p_holm` over all cells
        for `over_control`), `protected` tokens a picture, `already` kept without protection, `overflow`: share of
        pictures in which more are protected than may stay.
    """
    control = "{}@{}+as many as {}"
    groups = {
        control.format(m, k, r): [c for c in records["condition"].unique() if c.startswith(control.format(m, k, r))]
        for m in methods for k in keeps for r in roles
    }  # fmt: skip
    table = averaged(records, {name: members for name, members in groups.items() if members})
    accuracy = {row["condition"]: interval(row) for _, row in score_table(table, seed=seed, n_boot=n_boot).iterrows()}
    cells: list[dict[str, Any]] = []
    for method in methods:
        for keep in keeps:
            base = f"{method}@{keep}"
            for role in roles:
                names = [f"{base}+{role}", f"{base}+as many as {role}"]
                part = table[table["condition"].isin([base, *names])]
                gains = differences(part, base, seed=seed, n_boot=n_boot, n_perm=n_perm).set_index("condition")
                over = differences(
                    part[part["condition"] != base], names[1], seed=seed, n_boot=n_boot, n_perm=n_perm
                ).iloc[0]
                plain = table[table["condition"] == base]
                cells.append(
                    {
                        "method": method, "keep": keep, "role": role,
                        "gain": _test(gains.loc[names[0]]), "control_gain": _test(gains.loc[names[1]]),
                        "over_control": _test(over), "protected": float(plain[f"all {role}"].mean()),
                        "already": float(plain[f"kept {role}"].mean()),
                        "overflow": float((plain[f"all {role}"] > plain["got"]).mean()),
                    }
                )  # fmt: skip
    if cells:
        for cell, p in zip(cells, holm([cell["over_control"]["p"] for cell in cells]), strict=True):
            cell["over_control"]["p_holm"] = float(p)
    return {"accuracy": accuracy, "cells": cells, "images": int(records["image_id"].nunique())}


def _test(row: Any) -> dict[str, float]:
    return {name: float(row[name]) for name in ("value", "low", "high", "p")}


def verdict(facts: Mapping[str, Any]) -> str:
    """One sentence of what follows, and what does not."""
    cells = facts["cells"]
    if not cells:
        return "This model has one role only: there is nothing to protect against anything."
    sure = [c for c in cells if c["over_control"]["p_holm"] < ALPHA]
    good = [f"{c['role']} with {c['method']} at {c['keep']}" for c in sure if c["over_control"]["value"] > 0]
    bad = [f"{c['role']} with {c['method']} at {c['keep']}" for c in sure if c["over_control"]["value"] < 0]
    said = "; ".join(
        text for text in (
            f"protection helps more than protecting random tokens: {', '.join(good)}" if good else "",
            f"protection harms, against protecting random tokens: {', '.join(bad)}" if bad else "",
        ) if text
    )  # fmt: skip
    if not said:
        return (
            f"No role of {len(cells)} cells is worth more than as many random tokens (5 %, Holm); "
            "that is no proof that roles do not matter, only that this many questions do not show it."
        )
    return (
        f"{said[0].upper()}{said[1:]} (5 %, Holm over {len(cells)} cells). It does not follow why, nor that it holds "
        "for another model."
    )


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Gains of every cell with their controls, the published ones beside them, confounds, and what follows."""
    out = [*facts["book"]]
    for cell in facts["cells"]:
        published = PUBLISHED.get((cell["method"], cell["role"]))
        beside = "" if published is None else f"; LLaVA-1.5-7B in 2608.04483: +{published} % of its unpruned score"
        out.append(
            f"{cell['method']} keep {cell['keep']} + {cell['role']}: {points(cell['gain'])} points, as many random "
            f"ones {points(cell['control_gain'])}, difference {points(cell['over_control'])} "
            f"(p {cell['over_control']['p']:.3f}); {cell['protected']:.0f} protected, {cell['already']:.0f} were kept "
            f"anyway, more than fit in {cell['overflow']:.0%} of the pictures{beside}"
        )
    return [*out, verdict(facts)]


def draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Figure:
    """Gain over the plain method and over the controls, a row a method, budget and role."""
    cells = facts["cells"]
    panels = [
        Dots(title, "points", {_label(cell): [cell[key] for key in keys] for cell in cells}, series, zero=0.0)
        for title, keys, series in (
            ("gain over the method alone", ("gain", "control_gain"), ("role protected", "as many random tokens")),
            ("role minus random tokens", ("over_control",), ("difference",)),
        )
    ]
    width, height = 8.4, 1.25 + dots_height(panels[0]) + 1.6
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        1, 2, left=2.05 / width, right=0.98, top=1 - 1.15 / height, bottom=1.65 / height, wspace=0.1
    )
    for j, panel in enumerate(panels):
        axes = figure.add_subplot(grid[0, j])
        draw_dots(axes, panel, names=j == 0)
        if j == 0:
            dots_legend(figure, panel, y=1 - 0.42 / height)
    figure.suptitle("Protecting a role of visual tokens", x=0.02, ha="left", y=1 - 0.15 / height)
    rest = "\n".join(
        [
            f"Protected tokens stay, the method fills up to the budget ('rank'); random ones: {CONTROL_SEEDS} draws of "
            "as many tokens of the same picture.",
            wrapped(_sizes(facts)),
            wrapped(verdict(facts)),
        ]
    )
    figure.text(0.02, 0.1 / height, caption(facts, rest), fontsize=7.5, va="bottom")
    return figure


def _sizes(facts: Mapping[str, Any]) -> str:
    """How many tokens are protected, and where that is more than may stay: then nothing else does."""
    said = []
    for keep in facts["keep"]:
        for role in facts["protected"]:
            cell = next(cell for cell in facts["cells"] if (cell["keep"], cell["role"]) == (keep, role))
            over = f", more than {keep} in {cell['overflow']:.0%} of the pictures" if cell["overflow"] else ""
            said.append(f"{role}: {cell['protected']:.0f} tokens a picture{over}")
    return "; ".join(dict.fromkeys(said)) + ". All methods cut before the same layer."


def _label(cell: Mapping[str, Any]) -> str:
    return f"{cell['method']} {cell['keep']} + {cell['role']}"


FIGURE = FigureSpec(
    name="role-protection",
    summary="gain from protecting a role of visual tokens, beside protecting as many random ones",
    compute=compute,
    draw=draw,
    lines=lines,
    trace=False,
    roles=True,
)
