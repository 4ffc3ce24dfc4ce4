"""What recording attention mass costs: time and memory of a whole prefill, with eager `output_attentions` beside it.

    python benchmarks/mass.py [--tokens 2880 --layers 2 --repeats 3]

A random Llama with the heads (32 of 128 channels) and the MLP of a 7B model, but few layers: each costs the same, so
that the ratio is that of one layer. All masses are recorded, in every layer. Goals: at most 1.3 times the time of the
plain prefill and at most 200 MB more at its peak; the same output, bit for bit. Memory is the process's high-water mark
above where the run began, which Linux lets a process reset.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import medians, save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dart_lab.probes.attention_mass import AttentionMass, MassTrace
from dart_lab.vlm.recording import record

TEXT_BEFORE, TEXT_AFTER = 39, 60
CHANNELS, HEADS, INNER = 4096, 32, 11008
PROCESS = Path("/proc/self")


def main() -> None:
    """Measure, save the record and print it."""
    options = arguments()
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=CHANNELS, intermediate_size=INNER, num_hidden_layers=options.layers,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=8192,
        )
    ).eval()  # fmt: skip
    length = TEXT_BEFORE + options.tokens + TEXT_AFTER
    embeds = torch.randn(1, length, CHANNELS)
    visual = torch.zeros(1, length, dtype=torch.bool)
    visual[:, TEXT_BEFORE : TEXT_BEFORE + options.tokens] = True
    probe = AttentionMass()
    group = torch.full((length,), probe.names.index("after"))
    group[0], group[1:TEXT_BEFORE] = probe.names.index("bos"), probe.names.index("before")
    group[visual[0]] = probe.names.index("visual")
    outputs: dict[str, Tensor] = {}
    masses: dict[str, list[Tensor]] = {}
    peaks: dict[str, list[float]] = {}

    def plain() -> None:
        outputs["plain"] = model(inputs_embeds=embeds, logits_to_keep=1, use_cache=False).logits

    def probed() -> None:
        with record(model, probe, visual=visual) as trace:
            outputs["mass"] = model(inputs_embeds=embeds, logits_to_keep=1, use_cache=False).logits
        masses["mass"] = recorded(trace)

    def eager() -> None:
        model.set_attn_implementation("eager")
        weights = model(inputs_embeds=embeds, logits_to_keep=1, use_cache=False, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        masses["eager"] = [by_weights(one, group, len(probe.names)) for one in weights]

    def measured(name: str, run: Any) -> None:
        (PROCESS / "clear_refs").write_text("5", encoding="ascii")  # the high-water mark starts anew
        before = high_water()
        run()
        peaks.setdefault(name, []).append(high_water() - before)

    work = {"plain": plain, "mass": probed, "eager output_attentions": eager}
    with torch.inference_mode():
        times = medians(
            {name: lambda name=name, run=run: measured(name, run) for name, run in work.items()}, options.repeats
        )
    peak = {name: round(float(np.median(taken[1:])), 1) for name, taken in peaks.items()}  # the first warmed up
    difference = max(
        float((ours - theirs).abs().max()) for ours, theirs in zip(masses["mass"], masses["eager"], strict=True)
    )
    record_ = {
        "visual_tokens": options.tokens, "text_tokens": TEXT_BEFORE + TEXT_AFTER, "layers": options.layers,
        "channels": CHANNELS, "heads": HEADS, "inner": INNER, "groups": probe.names, "dtype": "float32",
        "repeats": options.repeats, "times": times, "peak_mb": peak,
        "times_plain": {
            name: round(times[name]["median_ms"] / times["plain"]["median_ms"], 3) for name in times if name != "plain"
        },
        "extra_mb": {name: round(peak[name] - peak["plain"], 1) for name in peak if name != "plain"},
        "goal_times_plain": 1.3, "goal_extra_mb": 200.0,
        "same_output": torch.equal(outputs["plain"], outputs["mass"]), "largest_difference_from_eager": difference,
    }  # fmt: skip
    print(save("mass", record_))
    print({name: value for name, value in record_.items() if name not in ("times", "groups")})


def recorded(trace: MassTrace) -> list[Tensor]:
    """Each layer's masses `(heads, groups, groups)` of a prompt."""
    return [torch.from_numpy(values[0][0, :, :-1]) for _, values in sorted(trace.passes[0].layers.items())]


def by_weights(weights: Tensor, group: Tensor, groups: int) -> Tensor:
    """The same from one layer's attention weights `(1, heads, n, n)`."""
    member = torch.nn.functional.one_hot(group, groups).float()
    each = weights[0] @ member  # (heads, queries, groups)
    return torch.einsum("qg,hqk->hgk", member / member.sum(dim=0).clamp(min=1), each)


def high_water() -> float:
    """Most memory (MB) that the process held since the mark was reset."""
    found = re.search(r"VmHWM:\s+(\d+)", (PROCESS / "status").read_text(encoding="ascii"))
    if found is None:
        raise SystemExit("this system does not tell a process's high-water mark; run the benchmark on Linux")
    return int(found[1]) * 1024 / 1e6


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Attention mass in prefill")
    parser.add_argument("--tokens", type=int, default=2880, help="visual tokens (default 2880)")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of each (default 3)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
