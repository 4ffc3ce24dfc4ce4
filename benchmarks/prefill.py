"""What hooks cost when they drop nothing, and how much of the theoretical gain pruning reaches in prefill.

    python benchmarks/prefill.py [--tokens 2880 --keep 320 --layer 2 --repeats 7]

A random Llama of 12 layers and 512 channels. Goals: keep-all costs less than 2 % of the plain prefill; pruning reaches
at least 95 % of the gain that counting multiply-accumulates predicts.
"""

from __future__ import annotations

import argparse

import torch
from machine import medians, save
from transformers import LlamaConfig, LlamaForCausalLM

from dart_lab.pruners import DART, KeepAll, Pruner, UniformGrid
from dart_lab.vlm.insert import prune

TEXT_BEFORE, TEXT_AFTER = 39, 60
LAYERS, CHANNELS, HEADS, INNER = 12, 512, 8, 1376


def main() -> None:
    """Measure, save the record and print it."""
    options = arguments()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=CHANNELS, intermediate_size=INNER, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=8192,
        )
    ).eval()
    length = TEXT_BEFORE + options.tokens + TEXT_AFTER
    embeds = torch.randn(1, length, CHANNELS)
    visual = torch.zeros(1, length, dtype=torch.bool)
    visual[:, TEXT_BEFORE : TEXT_BEFORE + options.tokens] = True

    def plain() -> None:
        model(inputs_embeds=embeds, logits_to_keep=1)

    def pruned(pruner: Pruner) -> None:
        with prune(model, pruner, visual=visual):
            plain()

    with torch.inference_mode():
        times = medians(
            {
                "plain": plain,
                "keep-all": lambda: pruned(KeepAll(layer=options.layer)),
                "uniform-grid": lambda: pruned(UniformGrid(keep=options.keep, layer=options.layer)),
                "dart": lambda: pruned(DART(keep=options.keep, layer=options.layer)),
            },
            options.repeats,
        )
    full, short = layer_macs(length), layer_macs(length - options.tokens + options.keep)
    theory = LAYERS * full / (options.layer * full + (LAYERS - options.layer) * short)
    gains = {
        name: round(times["plain"]["median_ms"] / times[name]["median_ms"], 3) for name in ("uniform-grid", "dart")
    }
    overhead = 100 * (times["keep-all"]["median_ms"] / times["plain"]["median_ms"] - 1)
    record = {
        "visual_tokens": options.tokens, "kept": options.keep, "text_tokens": TEXT_BEFORE + TEXT_AFTER,
        "layer": options.layer, "layers": LAYERS, "channels": CHANNELS, "dtype": "float32", "repeats": options.repeats,
        "times": times, "keep_all_overhead_percent": round(overhead, 2), "goal_overhead_percent": 2.0,
        "theoretical_gain": round(theory, 3), "measured_gain": gains,
        "percent_of_theory": {name: round(100 * gain / theory, 1) for name, gain in gains.items()},
        "goal_percent_of_theory": 95.0,
    }
    print(save("prefill", record))
    print({name: value for name, value in record.items() if "gain" in name or "percent" in name})


def layer_macs(length: int) -> float:
    """Multiply-accumulates of one layer: projections, attention over the causal half, and the gated MLP."""
    return length * (4 * CHANNELS**2 + 3 * CHANNELS * INNER) + length * (length + 1) * CHANNELS


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Hooks and pruning in prefill")
    parser.add_argument("--tokens", type=int, default=2880, help="visual tokens (default 2880)")
    parser.add_argument("--keep", type=int, default=320, help="visual tokens that stay (default 320)")
    parser.add_argument("--layer", type=int, default=2, help="K (default 2)")
    parser.add_argument("--repeats", type=int, default=7, help="counted runs of each (default 7)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
