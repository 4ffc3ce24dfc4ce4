"""DART's selection against one decoder layer of the same width and length.

    python benchmarks/selection.py [--tokens 2880 --channels 4096 --repeats 7]

Goal: selecting costs less than 1 % of one layer (2,880 visual tokens, 4,096 channels, without the certificate).
"""

from __future__ import annotations

import argparse

import torch
from machine import medians, save
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from dart_lab.pruners import DART, Signals

TEXT_BEFORE, TEXT_AFTER = 35, 60
HEAD_CHANNELS = 128


def main() -> None:
    """Measure, save the record and print it."""
    options = arguments()
    torch.manual_seed(0)
    length = TEXT_BEFORE + options.tokens + TEXT_AFTER
    config = LlamaConfig(
        hidden_size=options.channels, intermediate_size=round(options.channels * 2.6875),
        num_attention_heads=options.channels // HEAD_CHANNELS, num_key_value_heads=options.channels // HEAD_CHANNELS,
        attn_implementation="sdpa",
    )
    layer, rotary = LlamaDecoderLayer(config, 0).eval(), LlamaRotaryEmbedding(config)
    states = torch.randn(1, length, options.channels)
    position_ids = torch.arange(length)[None]
    embeddings = rotary(states, position_ids)
    heads = config.num_key_value_heads
    keys = torch.randn(1, length, heads, HEAD_CHANNELS).transpose(1, 2)  # the layout that attention receives
    visual = torch.arange(TEXT_BEFORE, TEXT_BEFORE + options.tokens)[None]

    def select(certificate: bool) -> None:
        signals = Signals.of(visual=visual, normed=states, keys=keys)
        DART(keep=options.tokens // 9, certificate=certificate)(signals)

    with torch.inference_mode():
        times = medians(
            {
                "layer": lambda: layer(states, position_ids=position_ids, position_embeddings=embeddings),
                "selection": lambda: select(False),
                "selection with certificate": lambda: select(True),
            },
            options.repeats,
        )
    whole = times["layer"]["median_ms"]
    share = {name: round(100 * t["median_ms"] / whole, 3) for name, t in times.items() if name != "layer"}
    print(save("selection", {
        "visual_tokens": options.tokens, "text_tokens": TEXT_BEFORE + TEXT_AFTER, "channels": options.channels,
        "kept": options.tokens // 9, "dtype": "float32", "repeats": options.repeats, "times": times,
        "percent_of_a_layer": share, "goal_percent": 1.0,
    }))
    print(times, share)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="DART's selection against one decoder layer")
    parser.add_argument("--tokens", type=int, default=2880, help="visual tokens (default 2880)")
    parser.add_argument("--channels", type=int, default=4096, help="width, a multiple of 128 (default 4096)")
    parser.add_argument("--repeats", type=int, default=7, help="counted runs of each (default 7)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
