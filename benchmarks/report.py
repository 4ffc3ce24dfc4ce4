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
    for name, describe in DESCRIBE.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        table = f"{times(record)}\n\n" if "times" in record else ""
        parts.append(f"## {name}.py\n\n{describe(record)}\n\n{table}{machine(record['machine'])}\n")
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


def methods(r: dict[str, Any]) -> str:
    """What methods.py found: a table of shares, and two checks."""
    lengths = list(r["percent_of_prefill"])
    names = sorted({name for own in r["percent_of_prefill"].values() for name in own})
    rows = [f"| {name} | " + " | ".join(_percent(r, length, name) for length in lengths) + " |" for name in names]
    layers = ", ".join(f"{r['times_by_tokens'][n]['one layer']['median_ms']:,.0f} ms at {n}" for n in lengths)
    greedy, points, one = r["divprune"]["times"], r["clustering"], r["fastv"]
    loop = _ratio(greedy, "loop over all taken", "one pass a step")
    double = _ratio(greedy, "twice as many", "one pass a step")
    matrix = _ratio(one["times"], "whole matrix", "one row")
    cube = _ratio(points["times"], "(m, m, d) distances alone", "whole clustering")
    prefill = (
        f"Selection of every method, all its stages together, in percent of the prefill of {r['layers']} layers of "
        f"{r['channels']:,} channels ({r['dtype']}, {r['kept_share']} of the visual tokens kept, {r['text_tokens']} "
        f"text tokens; one layer takes {layers}; medians of {r['repeats']} runs)."
    )
    checks = (
        f"DivPrune's choice of {r['divprune']['kept']} of {r['divprune']['tokens']:,} tokens is {loop:.1f} times "
        f"faster than a loop over all tokens taken so far (same tokens: {r['divprune']['same_tokens']}), and "
        f"{double:.1f} times slower for twice as many. SparseVLM's clustering of {points['points']} tokens of "
        f"{points['channels']:,} channels makes no array of more than {points['largest_array']:,} numbers; (m, m, d) "
        f"would be {points['m_m_d']:,}; of {points['narrow']} channels, the distances from such an array alone take "
        f"{cube:.1f} times as long as the whole clustering. FastV's choice of {one['kept']} of {one['tokens']} tokens "
        f"from one row of attention is {matrix:.0f} times faster than from the whole matrix (same tokens: "
        f"{one['same_tokens']})."
    )
    head = ["| method | " + " | ".join(f"{n} tokens" for n in lengths) + " |", "|---|" + "---|" * len(lengths)]
    refused = [f"{name}: {why.removeprefix(f'{name}: ')}." for name, why in r["refused"].items()]
    return "\n".join([prefill, "", *head, *rows, "", *refused, "", checks])


def branch(r: dict[str, Any]) -> str:
    """What branch.py found: one row a model."""
    head = (
        f"A sweep of {len(r['alphas'])} α × {len(r['budgets'])} budgets ({', '.join(map(str, r['budgets']))} of "
        f"{r['visual_tokens']} visual tokens) cut at layer {r['layer']}: all conditions from one run of what they have "
        "in common, against each from the start. The gain that multiply-accumulates allow counts the prompts only: "
        "decoding, selection and what a larger batch saves or costs are not in it. "
        f"Processor time of one thread, median of {r['repeats']} run(s)."
    )
    names = ("model", "prompts", "alone s", "shared s", "gain", "goal", "allowed", "reached", "same answers")
    rows = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name, f in r["found"].items():
        seconds = {kind: f["times"][kind]["median_ms"] / 1e3 for kind in ("alone", "shared")}
        rows.append(
            f"| {name} | {f['prompts']} | {seconds['alone']:.2f} | {seconds['shared']:.2f} | {f['measured_gain']}× | "
            f"{r['goals'][name]:g}× | {f['theoretical_gain']}× | {f['percent_of_theory']} % (goal: "
            f"{r['goal_percent_of_theory']:g} %) | {f['same_answers']} of {f['answers']} |"
        )
    size = r["seven_billion"]["size"]
    seven = (
        f"Counted, not measured: a model of {size['layers']} layers and {size['width']:,} channels (7B) with the tower "
        f"of LLaVA-1.5 and {size['text']} text tokens may gain {r['seven_billion']['theoretical_gain']}× on the same "
        "sweep, since the remainder of each condition dominates there."
    )
    return "\n".join([head, "", *rows, "", seven])


def encode_once(r: dict[str, Any]) -> str:
    """What encode_once.py found: one row a model."""
    head = (
        f"{', '.join(r['methods'])} × {len(r['budgets'])} budgets ({', '.join(map(str, r['budgets']))} of "
        f"{r['visual_tokens']} visual tokens), all in front of the language model: the vision tower once for all of "
        f"them, against once for each. Processor time of one thread, median of {r['repeats']} run(s)."
    )
    names = ("model", "prompts", "tower alone s", "alone s", "shared s", "gain", "towers run", "same answers")
    rows = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name, f in r["found"].items():
        seconds = {kind: f["times"][kind]["median_ms"] / 1e3 for kind in ("tower", "alone", "shared")}
        rows.append(
            f"| {name} | {f['prompts']} | {seconds['tower']:.2f} | {seconds['alone']:.2f} | {seconds['shared']:.2f} | "
            f"{f['gain']}× | {f['runs']['shared']} against {f['runs']['alone']} | "
            f"{f['same_answers']} of {f['answers']} |"
        )
    return "\n".join([head, "", *rows])


def studies(r: dict[str, Any]) -> str:
    """What studies.py found."""
    k, m = r["kills"], r["memory"]
    return (
        f"A study of {k['samples']} samples and 4 conditions, killed (SIGKILL) {k['killed']} times at random moments "
        f"and resumed: same bytes as the uninterrupted one: {k['same_bytes']}; {k['rows']:,} rows, {k['lost']} lost, "
        f"{k['doubled']} doubled.\n\n"
        f"{m['samples']:,} samples in {m['blocks']:,} blocks: {m['first_mib']} MiB resident after the first block, "
        f"{m['last_mib']} MiB after the last; slope over the second half {m['slope_kib_per_1000_samples']} KiB per "
        "1,000 samples."
    )


def rolebook(r: dict[str, Any]) -> str:
    """What rolebook.py found."""
    stops = " and ".join(map(str, r["killed_after_blocks"]))
    return (
        f"`dart-lab roles fit` on `tiny` and {r['pictures']:,} drawn pictures: {r['wall_s']:,.0f} s "
        f"({r['processor_s']:,.0f} s of processor time, beside other work). {r['first_mib']} MiB resident after the "
        f"first of {r['blocks']} blocks, {r['last_mib']} MiB after the last; slope over the second half "
        f"{r['slope_mib_per_1000_pictures']} MiB per 1,000 pictures; {r['peak_mib']} MiB at the peak, with the "
        f"clustering. Killed (SIGKILL) after {stops} blocks and started again: same bytes as the uninterrupted one: "
        f"{r['same_bytes']}."
    )


def mass(r: dict[str, Any]) -> str:
    """What mass.py found, in a few sentences."""
    slow, more, eager = r["times_plain"], r["extra_mb"], "eager output_attentions"
    return (
        f"Prefill of {r['layers']} layers of {r['heads']} heads and {r['channels']:,} channels (MLP {r['inner']:,}), "
        f"{r['visual_tokens']:,} visual and {r['text_tokens']} text tokens, {r['dtype']}. All masses of all layers "
        f"take {slow['mass']} times the plain prefill (goal: at most {r['goal_times_plain']:g}) and "
        f"{more['mass']:g} MB more at its peak (goal: at most {r['goal_extra_mb']:g}); same output, bit for bit: "
        f"{r['same_output']}. Eager attention with its weights takes {slow[eager]} times and {more[eager]:,.0f} MB "
        f"more; its masses differ by at most {r['largest_difference_from_eager']:.1e}."
    )


def _ratio(times: dict[str, Any], one: str, other: str) -> float:
    return float(times[one]["median_ms"] / times[other]["median_ms"])


def _percent(r: dict[str, Any], length: str, name: str) -> str:
    found = r["percent_of_prefill"][length].get(name)
    return "refused" if found is None else f"{found:.3f}"


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


DESCRIBE = {
    "selection": selection,
    "prefill": prefill,
    "methods": methods,
    "studies": studies,
    "branch": branch,
    "encode_once": encode_once,
    "mass": mass,
    "rolebook": rolebook,
}


if __name__ == "__main__":
    main()
