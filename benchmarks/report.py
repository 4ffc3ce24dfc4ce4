"""Write benchmarks/README.md from the records in benchmarks/results.

    python benchmarks/report.py
"""

from __future__ import annotations

import json
from typing import Any

from machine import RESULTS

HEAD = """# Benchmarks

Written by `python benchmarks/report.py` from `results/*.json`; do not edit. Times are medians of interleaved runs in
one process, in milliseconds of one thread's processor time; ratios are the result, milliseconds depend on the machine.
"""


def main() -> None:
    """Put the page together."""
    parts = [HEAD]
    for name, describe in (("selection", selection), ("prefill", prefill)):
        record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        parts.append(f"## {name}.py\n\n{describe(record)}\n\n{times(record)}\n\n{machine(record['machine'])}\n")
    target = RESULTS.with_name("README.md")
    partial = target.with_suffix(".partial")
    partial.write_text("\n".join(parts), encoding="utf-8")
    partial.replace(target)


def selection(r: dict[str, Any]) -> str:
    """What selection.py found, in a sentence."""
    share = ", ".join(f"{name} {percent} %" for name, percent in r["percent_of_a_layer"].items())
    return (
        f"DART on {r['visual_tokens']:,} visual tokens of {r['channels']:,} channels, in percent of one decoder "
        f"layer of that width and length ({r['dtype']}): {share}. Goal: below {r['goal_percent']:g} % without the "
        "certificate."
    )


def prefill(r: dict[str, Any]) -> str:
    """What prefill.py found, in a sentence."""
    gains = ", ".join(
        f"{name} {gain}× ({r['percent_of_theory'][name]} % of theory)" for name, gain in r["measured_gain"].items()
    )
    return (
        f"{r['layers']} layers of {r['channels']} channels, {r['visual_tokens']:,} → {r['kept']:,} visual tokens "
        f"at layer {r['layer']}, {r['text_tokens']} text tokens. Keep-all costs {r['keep_all_overhead_percent']} % "
        f"(goal: below {r['goal_overhead_percent']:g} %). Multiply-accumulates predict {r['theoretical_gain']}×; "
        f"measured: {gains} "
        f"(goal: at least {r['goal_percent_of_theory']:g} %)."
    )


def times(r: dict[str, Any]) -> str:
    """A table of all times."""
    rows = [f"| {name} | {t['median_ms']} | {t['least_ms']} |" for name, t in r["times"].items()]
    return "\n".join(["| work | median ms | least ms |", "|---|---|---|", *rows])


def machine(m: dict[str, Any]) -> str:
    """The machine, in a line."""
    return (
        f"{m['processor']}, {m['cores']} cores, threads used: {m['threads']}, {m['capability']}; Python {m['python']}, "
        f"torch {m['torch']}, transformers {m['transformers']}."
    )


if __name__ == "__main__":
    main()
