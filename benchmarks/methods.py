"""What each method's selection costs, as a share of the prefill it belongs to.

    python benchmarks/methods.py [--tokens 576 2880 --repeats 3]

Shapes of LLaVA-1.5-7B (32 layers of 4,096 channels; CLIP-L's tower of 1,024), random states. A method's selection is
everything that it computes from queries, keys and states, over all of its stages; 2,880 tokens before the language
model are 5 crops. The prefill is 32 times one decoder layer of that length, measured in the same run. Also, beside the
straightforward reading of the formula: DivPrune and a loop that looks at all tokens taken so far in every step, FastV
and the whole attention matrix, SparseVLM's clustering and distances from an (m, m, d) array; and the largest array of
that clustering.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from machine import medians, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from dart_lab.errors import DartLabError
from dart_lab.pruners import Pruner, Signals, pruner_names
from dart_lab.pruners.clustering import dpc_knn
from dart_lab.pruners.diversity import cosine_distance, farthest_point
from dart_lab.pruners.fitting import BUDGETLESS, PUBLISHED_BLOCKS, PUBLISHED_DEPTH, Depth, fit
from dart_lab.vlm.providers import layer_providers, received
from dart_lab.vlm.tap import Captured, attention_logits, attention_rows

CHANNELS, HEADS, HEAD, INNER = 4096, 32, 128, 11008
TOWER_CHANNELS, TOWER_HEADS, CROP = 1024, 16, 576
BEFORE, AFTER = 35, 60  # text tokens
SHARE = 9  # one token in nine stays
CLUSTERED = 600  # deleted tokens that SparseVLM clusters, at most
NARROW = 256  # channels at which an (m, m, d) array fits into memory


def main() -> None:
    """Measure, save the record and print it."""
    options = arguments()
    torch.manual_seed(0)
    times: dict[str, dict[str, dict[str, float]]] = {}
    with torch.inference_mode():
        for tokens in options.tokens:
            llm = Llm(tokens)
            work: dict[str, Callable[[], object]] = {"one layer": llm.layer_pass}
            refused: dict[str, str] = {}
            for name in pruner_names():
                if name in BUDGETLESS:
                    continue
                try:
                    depth = Depth(layers=PUBLISHED_DEPTH, blocks=PUBLISHED_BLOCKS, visual=tokens)
                    selection = Selection(fit(name, keep=tokens // SHARE, depth=depth), llm)
                    selection()
                    work[name] = selection
                except DartLabError as error:
                    refused[name] = str(error)
            times[str(tokens)] = medians(work, options.repeats)
        record = {
            "kept_share": f"1/{SHARE}", "text_tokens": BEFORE + AFTER, "channels": CHANNELS, "layers": PUBLISHED_DEPTH,
            "dtype": "float32", "repeats": options.repeats, "times_by_tokens": times, "refused": refused,
            "percent_of_prefill": {
                tokens: {name: round(100 * t["median_ms"] / (PUBLISHED_DEPTH * own["one layer"]["median_ms"]), 3)
                         for name, t in own.items() if name != "one layer"}
                for tokens, own in times.items()
            },
            "divprune": divprune(options.repeats), "clustering": clustering(options.repeats),
            "fastv": fastv(options.repeats),
        }
    print(save("methods", record))
    print(record["percent_of_prefill"], record["divprune"], record["clustering"], record["fastv"])


class Llm:
    """One decoder layer with its input, and what its attention received."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.length = tokens, BEFORE + tokens + AFTER
        config = LlamaConfig(
            hidden_size=CHANNELS, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=HEADS,
            attn_implementation="sdpa",
        )
        self.layer, self.norm = LlamaDecoderLayer(config, 0).eval(), LlamaRMSNorm(CHANNELS)
        self.states = torch.randn(1, self.length, CHANNELS)
        self.positions = torch.arange(self.length)[None]
        self.rotary = LlamaRotaryEmbedding(config)(self.states, self.positions)
        self.captured = heads_of(1, self.length, HEADS, HEAD)

    def layer_pass(self) -> Tensor:
        """One decoder layer on the whole prompt."""
        return self.layer(self.states, position_ids=self.positions, position_embeddings=self.rotary)

    def signals(self, visual: Tensor, original: int) -> Signals:
        """What a method before a decoder layer may look at, computed when it asks."""
        attended = torch.ones(1, self.length, dtype=torch.bool)
        text = SimpleNamespace(norm=self.norm, layers=Everywhere(self.layer))
        return Signals(
            visual=visual, attended=attended, original=torch.tensor([original]), grid=square(visual.shape[1], 1, 0),
            providers={
                "image_embeds": lambda: self.states[:, BEFORE : BEFORE + self.tokens],
                "survives": lambda: attended,  # MustDrop's cache stage: nothing left since
                **layer_providers(
                    text, self.captured, layer=1, states=self.states, before=0, attended=attended,
                    embeds=lambda: self.states, entered=lambda: self.states, positions=lambda: self.rotary,
                ),
            },
        )


class Selection:
    """All stages of a method, each on the tokens that the one before left."""

    def __init__(self, method: Pruner, llm: Llm) -> None:
        self.parts, self.llm = method.parts(), llm
        self.crops = max(llm.tokens // CROP, 1)
        self.tower = heads_of(self.crops, CROP + 1, TOWER_HEADS, TOWER_CHANNELS // TOWER_HEADS)
        self.features = torch.randn(self.crops, CROP + 1, TOWER_CHANNELS)

    def __call__(self) -> None:
        left, in_crop = self.llm.tokens, CROP
        for part in self.parts:
            if part.stage.kind in ("LLM_LAYER", "POST_PREFILL_CACHE", "LLM_IN"):
                whole = part.whole_cache
                visual = torch.arange(self.llm.length)[None] if whole else torch.arange(BEFORE, BEFORE + left)[None]
                left = int(part(self.llm.signals(visual, self.llm.tokens)).counts[0])
            else:
                with_cls = bool(part.keeps_cls) and part.stage.kind != "PROJECTED"
                counts = part(self.crop_signals(in_crop, part.stage.kind, with_cls)).counts
                in_crop = int(counts.max()) - (with_cls and part.stage.kind == "VIT_BLOCK")
                left = in_crop * self.crops

    def crop_signals(self, patches: int, kind: str, with_cls: bool) -> Signals:
        """What a method in the tower or behind the projector may look at."""
        if kind == "PROJECTED":
            states = self.llm.states[:, : patches].expand(self.crops, -1, -1)
            visual = torch.arange(patches).expand(self.crops, -1)
            return Signals.of(visual=visual, hidden=states, grid=square(patches, self.crops, 0))
        length = patches + 1
        captured = Captured(*(part[:, :, :length] for part in (self.tower.query, self.tower.key, self.tower.value)),
                            None, self.tower.scaling, False)  # fmt: skip
        attended = torch.ones(self.crops, length, dtype=torch.bool)

        def rows(queries: Tensor) -> Tensor:
            return attention_rows(captured, queries, 0)

        return Signals(
            visual=torch.arange(0 if with_cls else 1, length).expand(self.crops, -1), attended=attended,
            cls=torch.zeros(self.crops, dtype=torch.int64), grid=square(patches, self.crops, int(with_cls)),
            original=torch.full((self.crops,), CROP + with_cls), image=torch.zeros(self.crops, dtype=torch.int64),
            region=regions(self.crops),
            providers={
                "hidden": lambda: self.features[:, :length], "keys": lambda: captured.key,
                "values": lambda: captured.value, "attention": rows, "sizes": lambda: torch.ones(self.crops, length),
                "attention_logits": lambda queries: attention_logits(captured, queries),
                "received": lambda: received(captured, attended, 0),
                **{f"attention@{block}": rows for block in range(PUBLISHED_BLOCKS + 1)},
            },
        )


class Everywhere:
    """The same layer at every depth."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getitem__(self, index: int) -> Any:
        return self.layer


def heads_of(batch: int, length: int, heads: int, width: int) -> Captured:
    """Random queries, keys and values of one attention call."""
    query, key, value = (torch.randn(batch, length, heads, width).transpose(1, 2) for _ in range(3))
    return Captured(query, key, value, None, width**-0.5)


def square(tokens: int, batch: int, off_grid: int) -> Tensor:
    """Places of tokens on a grid as square as can be, after `off_grid` that lie on none."""
    side = max(int(tokens**0.5), 1)
    cell = torch.arange(tokens)
    grid = torch.stack([cell * 0, cell * 0, cell // side, cell % side], dim=1)
    return torch.cat([torch.full((off_grid, 4), -1), grid]).expand(batch, -1, -1)


def regions(crops: int) -> Tensor:
    """A view of the whole, then a column of equal parts for each further crop."""
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    if crops == 1:
        return whole
    edge = torch.linspace(0, 1, crops)
    parts = torch.stack([edge[:-1], torch.zeros(crops - 1), edge[1:], torch.ones(crops - 1)], dim=1)
    return torch.cat([whole, parts])


def divprune(repeats: int) -> dict[str, Any]:
    """Greedy max–min after the distances: ours, and a loop that looks at all tokens taken so far in every step."""
    n, keep = 2880, 320
    distance = cosine_distance(torch.randn(1, n, 64))
    valid = torch.ones(1, n, dtype=torch.bool)

    def loop() -> list[int]:
        taken = [int((distance[0] + 9 * torch.eye(n)).amin(dim=1).argmax())]
        while len(taken) < keep:
            near = distance[0, taken].amin(dim=0)
            near[taken] = -1
            taken.append(int(near.argmax()))
        return taken

    ours = farthest_point(distance, torch.tensor([keep]), valid)[0][0].tolist()
    times = medians(
        {
            "one pass a step": lambda: farthest_point(distance, torch.tensor([keep]), valid),
            "loop over all taken": loop,
            "twice as many": lambda: farthest_point(distance, torch.tensor([2 * keep]), valid),
        },
        repeats,
    )
    return {"tokens": n, "kept": keep, "same_tokens": ours == loop(), "times": times}


def fastv(repeats: int) -> dict[str, Any]:
    """FastV's choice from one row of attention: ours, and the whole matrix with its last row taken."""
    llm = Llm(CROP)
    keep = CROP // SHARE
    method = fit("fastv", keep=keep, depth=Depth(layers=PUBLISHED_DEPTH, blocks=PUBLISHED_BLOCKS, visual=CROP))
    visual = torch.arange(BEFORE, BEFORE + CROP)[None]

    def ours() -> list[int]:
        return list(method(llm.signals(visual, CROP)).keep[0].tolist())

    def matrix() -> list[int]:
        logits = llm.captured.query @ llm.captured.key.mT * llm.captured.scaling
        later = torch.ones(llm.length, llm.length, dtype=torch.bool).triu(1)
        attention = logits.masked_fill(later, float("-inf")).softmax(dim=-1).mean(dim=1)
        return sorted(attention[0, -1, BEFORE : BEFORE + CROP].topk(keep).indices.tolist())

    times = medians({"one row": ours, "whole matrix": matrix}, repeats)
    return {"tokens": CROP, "kept": keep, "same_tokens": ours() == matrix(), "times": times}


def clustering(repeats: int) -> dict[str, Any]:
    """SparseVLM's clustering: its largest array in numbers, and its distances beside those from an (m, m, d) array."""
    x, valid = torch.randn(1, CLUSTERED, CHANNELS), torch.ones(1, CLUSTERED, dtype=torch.bool)
    with Largest() as largest:
        dpc_knn(x, torch.tensor([CLUSTERED // 10]), valid)
    narrow = x[..., :NARROW]
    times = medians(
        {
            "whole clustering": lambda: dpc_knn(narrow, torch.tensor([CLUSTERED // 10]), valid),
            "(m, m, d) distances alone": lambda: (narrow[:, :, None] - narrow[:, None]).norm(dim=-1),
        },
        repeats,
    )
    return {
        "points": CLUSTERED, "channels": CHANNELS, "largest_array": largest.numbers,
        "m_m_d": CLUSTERED**2 * CHANNELS, "narrow": NARROW, "times": times,
    }  # fmt: skip


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Cost of every method's selection")
    parser.add_argument("--tokens", type=int, nargs="+", default=[576, 2880], help="visual tokens (default 576 2880)")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of each (default 3)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
