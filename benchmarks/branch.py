"""What a sweep gains when its conditions share their prefix, beside the gain that multiply-accumulates allow.

    python benchmarks/branch.py [--n 200 --random 2 --repeats 1]

Nine α by five budgets, cut at layer 2: once every condition from the start, once all from one run of the vision tower
and the first layers. On `tiny` (four families of questions) and on a random model of 12 layers and 512 channels whose
vision tower is as wide and deep in proportion as that of LLaVA-1.5. Goals: 4 and 2 times faster, the same answers, and
90 % of the gain that the counts allow. For a 7B model only the counts are given.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from machine import medians, save
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import dart_lab as dl
from dart_lab.pruners import Alpha
from dart_lab.studies.branch import branch

ALPHAS = [step / 8 for step in range(9)]
BUDGETS = (16, 32, 64, 128, 192)
LAYER, VISUAL = 2, 576
FAMILIES = ("exist", "attribute", "relation", "text")
RANDOM_TEXT, NEW_TOKENS = 24, 2
BATCH = 4  # questions of tiny that run together
GOALS = {"tiny": 4.0, "random": 2.0}


@dataclass(frozen=True)
class Size:
    """What the multiply-accumulates of a prompt depend on: decoder, vision tower (`v_…`) and text tokens."""

    layers: int
    width: int
    inner: int
    v_layers: int
    v_width: int
    v_inner: int
    text: int

    def decoder(self, visual: int) -> float:
        """One decoder layer: projections, gated MLP, and attention over the causal half."""
        length = visual + self.text
        return length * (4 * self.width**2 + 3 * self.width * self.inner) + length * (length + 1) * self.width

    def tower(self) -> float:
        """The vision tower on one picture: projections, MLP and full attention in every block."""
        length = VISUAL + 1
        block = length * (4 * self.v_width**2 + 2 * self.v_width * self.v_inner) + 2 * length**2 * self.v_width
        return self.v_layers * block

    def gain(self) -> float:
        """Multiply-accumulates of all conditions from the start, over those with a shared prefix; prompts only."""
        prefix = self.tower() + LAYER * self.decoder(VISUAL)
        rest = len(ALPHAS) * sum((self.layers - LAYER) * self.decoder(keep) for keep in BUDGETS)
        return (len(ALPHAS) * len(BUDGETS) * prefix + rest) / (prefix + rest)


SEVEN_BILLION = Size(layers=32, width=4096, inner=11008, v_layers=24, v_width=1024, v_inner=4096, text=60)


def main() -> None:
    """Measure, save the record and print it."""
    options = arguments()
    vlm = dl.load("tiny")
    batches = [batch for family in FAMILIES for batch in tiny_batches(vlm, family, options.n)]
    model, inputs = random_model(), random_batch(options.random)
    found = {
        "random": measure(model, [inputs], options.repeats),
        "tiny": measure(vlm.model, batches, options.repeats, warm_up=int(len(batches) <= len(FAMILIES))),
    }
    found["tiny"] |= {"prompts": options.n * len(FAMILIES), "families": FAMILIES}
    found["random"] |= {"prompts": options.random}
    for name, result in found.items():
        print(name, {key: value for key, value in result.items() if key not in ("times", "size")})
    record = {
        "alphas": ALPHAS,
        "budgets": BUDGETS,
        "layer": LAYER,
        "visual_tokens": VISUAL,
        "dtype": "float32",
        "repeats": options.repeats,
        "goals": GOALS,
        "goal_percent_of_theory": 90.0,
        "found": found,
        "seven_billion": {"size": asdict(SEVEN_BILLION), "theoretical_gain": round(SEVEN_BILLION.gain(), 3)},
    }
    print(save("branch", record))


def measure(
    model: Any, batches: Sequence[Mapping[str, Any]], repeats: int, *, warm_up: int = 1
) -> dict[str, Any]:
    """Times of the sweep over all batches, shared and alone, and how many answers agree."""
    answers: dict[bool, list[list[Tensor]]] = {}
    shared: set[bool] = set()

    def sweep(share: bool) -> None:
        conditions = [Alpha(keep=keep, alpha=alpha, layer=LAYER) for keep in BUDGETS for alpha in ALPHAS]
        answers[share] = []
        for b in batches:
            found = branch(model, b, conditions, max_new_tokens=NEW_TOKENS, share=share)
            answers[share].append([one.tokens for one in found])
            shared.update(one.shared for one in found if share)

    times = medians({"shared": lambda: sweep(True), "alone": lambda: sweep(False)}, repeats, warm_up=warm_up)
    pairs = [
        (one, other)
        for together, apart in zip(answers[True], answers[False], strict=True)
        for one, other in zip(together, apart, strict=True)
    ]
    size = size_of(model, sum(b["input_ids"].shape[1] for b in batches) / len(batches))
    measured, theory = times["alone"]["median_ms"] / times["shared"]["median_ms"], size.gain()
    return {
        "size": asdict(size),
        "times": times,
        "theoretical_gain": round(theory, 3),
        "measured_gain": round(measured, 3),
        "percent_of_theory": round(100 * measured / theory, 1),
        "answers": sum(len(one) for one, _ in pairs),
        "same_answers": sum(int((one == other).all(dim=1).sum()) for one, other in pairs),
        "all_shared": shared == {True},
    }


def size_of(model: Any, length: float) -> Size:
    """The sizes of a LLaVA whose prompts have `length` tokens."""
    text, vision = model.config.text_config, model.config.vision_config
    return Size(
        text.num_hidden_layers, text.hidden_size, text.intermediate_size, vision.num_hidden_layers, vision.hidden_size,
        vision.intermediate_size, round(length) - VISUAL,
    )  # fmt: skip


def tiny_batches(vlm: Any, family: str, n: int) -> list[Mapping[str, Any]]:
    """Questions of a family, in batches."""
    task = dl.load_task("shapes", n=n, seed=0, families=[family])
    groups = [task[start : start + BATCH] for start in range(0, n, BATCH)]
    return [vlm.prepare([s.image for s in group], [s.question for s in group]) for group in groups]


def random_model() -> Any:
    """12 layers, 512 channels; the tower a quarter as wide and three quarters as deep."""
    torch.manual_seed(0)
    side, patch = 24, 14
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=128, intermediate_size=512, num_hidden_layers=9, num_attention_heads=4,
                image_size=side * patch, patch_size=patch, projection_dim=128,
            ),
            text_config=LlamaConfig(
                vocab_size=64, hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8,
                num_key_value_heads=8, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            ),
            image_token_index=3,
        )
    ).eval()  # fmt: skip
    model.generation_config.eos_token_id = None  # every answer has the same length
    return model


def random_batch(n: int) -> Mapping[str, Any]:
    """Noise pictures between random words."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(4, 64, (n, RANDOM_TEXT), generator=generator)
    half = RANDOM_TEXT // 2
    ids = torch.cat([words[:, :half], torch.full((n, VISUAL), 3), words[:, half:]], dim=1)
    pixels = torch.randn(n, 3, 24 * 14, 24 * 14, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Sweeps with a shared prefix")
    parser.add_argument("--n", type=int, default=4, help="questions of each family on tiny (default 4)")
    parser.add_argument("--random", type=int, default=2, help="prompts for the random model (default 2)")
    parser.add_argument("--repeats", type=int, default=2, help="counted runs of each (default 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
