"""What a method saves: visual tokens, multiply-accumulates and cache bytes, each under a named convention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Literal, get_args

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.budget import check_choice
from dart_lab.pruners.counting import planned

Average = Literal["processed", "output"]
Curve = Literal["flat", "halving"]
MLP_MATRICES = {"2ndm": 2, "3ndm": 3}  # the papers' formula, and what a gated MLP (SwiGLU) really has
MACS_TO_FLOPS = 2


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the cost of a prompt depends on.

    Args:
        layers: decoder layers. width: d, hidden size. mlp_width: m, intermediate size.
        heads, kv_heads, head_dim: of the attention; kv_heads = heads without grouped queries.
        visual: visual tokens of the prompt, all images and crops. text: all its other tokens.
        crops: views that a method before the language model looks at one by one. Default 1.
        value_bytes: of one number in the cache. Default 2 (float16, bfloat16).

    Raises `DartLabError` for a value that is no whole number in range.
    """

    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    visual: int
    text: int = 0
    crops: int = 1
    value_bytes: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "text" else 1
            if type(value) is not int or value < least:
                raise DartLabError(f"model shape: {name}={value!r}: give a whole number of at least {least}")
        if self.visual % self.crops:
            raise DartLabError(f"model shape: {self.visual} visual tokens are not {self.crops} equal crops")


@dataclass(frozen=True)
class Metric:
    """One number with its unit and the convention it was counted by."""

    name: str
    value: float
    unit: str
    convention: str = ""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The prefill and the KV cache of one prompt under a method.

    Attributes:
        model: the shape.
        processed: visual tokens that each decoder layer processes.
        cached: visual tokens in each layer's cache after the prompt.
        asked: what each stage was asked to keep.
        method: its name.

    >>> shape = ModelShape(layers=32, width=4096, mlp_width=11008, heads=32, kv_heads=32, head_dim=128, visual=576)
    >>> cost = Cost.of({2: 144}, shape)
    >>> cost.average("processed"), cost.average("output"), round(100 * cost.macs_ratio(), 1)
    (171.0, 157.5, 29.2)
    """

    model: ModelShape
    processed: tuple[int, ...]
    cached: tuple[int, ...]
    asked: tuple[int, ...] = ()
    method: str = ""

    @classmethod
    def of(cls, kept: Mapping[int, int], model: ModelShape) -> Cost:
        """From what is kept: decoder layer → visual tokens from there on; layer 0 stands for cuts before the model.

        Raises:
            DartLabError: layers that the model does not have or that do not increase, counts that grow.
        """
        layers, counts = list(kept), [model.visual, *kept.values()]
        if layers != sorted(set(layers)) or any(not 0 <= layer < model.layers for layer in layers):
            raise DartLabError(f"layers {layers} must increase and lie between 0 and {model.layers - 1}")
        if counts != sorted(counts, reverse=True) or counts[-1] < 0:
            raise DartLabError(f"tokens {counts} must not grow from stage to stage, nor be negative")
        cuts = [0, *layers, model.layers]
        spans = (end - start for start, end in pairwise(cuts))
        processed = tuple(count for count, span in zip(counts, spans, strict=True) for _ in range(span))
        return cls(model=model, processed=processed, cached=processed, asked=tuple(kept.values()))

    @property
    def kept(self) -> int:
        """Visual tokens that the last layer processes."""
        return self.processed[-1]

    def average(self, convention: Average = "processed") -> float:
        """Visual tokens averaged over the layers.

        "processed": what each layer runs on. "output": what each layer hands on, a cut before layer K counting as the
        output of layer K−1, which is how SparseVLM names its budgets.
        """
        check_choice("average", "convention", convention, get_args(Average))
        tokens = self.processed if convention == "processed" else (*self.processed[1:], self.processed[-1])
        return sum(tokens) / self.model.layers

    def macs(self, *, mlp: str = "2ndm", text: bool = False) -> int:
        """Multiply-accumulates of the prefill's decoder layers; papers call this number FLOPs.

        Of a layer that runs on n tokens: 4nd² + 2n²d + 2ndm (FastV's equation 5; "3ndm" for a gated MLP), where with
        grouped queries the key and value projections are as narrow as they are. Causality halves nothing. Language
        model alone: no vision tower, no selection, no output head.

        Args:
            mlp: "2ndm" or "3ndm".
            text: whether n includes the other tokens of the prompt.
        """
        check_choice("macs", "mlp", mlp, MLP_MATRICES)
        return sum(_layer_macs(self.model, n + text * self.model.text, mlp) for n in self.processed)

    def macs_ratio(self, *, mlp: str = "2ndm", text: bool = False) -> float:
        """`macs` as a share of the same prompt's without pruning."""
        model = self.model
        layer = _layer_macs(model, model.visual + text * model.text, mlp)
        return self.macs(mlp=mlp, text=text) / (model.layers * layer)

    def kv_bytes(self, *, text: bool = False) -> int:
        """Bytes of keys and values in the cache after the prompt, layer by layer as they are."""
        return sum(n + text * self.model.text for n in self.cached) * _layer_kv_bytes(self.model)

    def kv_ratio(self, *, text: bool = False) -> float:
        """`kv_bytes` as a share of the same prompt's without pruning."""
        model = self.model
        return self.kv_bytes(text=text) / (model.layers * (model.visual + text * model.text) * _layer_kv_bytes(model))

    def kv_rounded_mb(self) -> float:
        """Megabytes as papers print them: a constant a token, rounded up to three decimals, times the tokens kept last.

        For LLaVA-1.5-7B the constant is 0.525. The full tokens in the layers before the cut are left out.
        """
        per_token = Fraction(self.model.layers * _layer_kv_bytes(self.model), 1_000_000)
        return float(Fraction(math.ceil(per_token * 1000), 1000) * self.kept)

    def report(self) -> tuple[Metric, ...]:
        """Every number there is, with unit and convention."""
        out = [Metric(f"asked, stage {i}", n, "visual tokens") for i, n in enumerate(self.asked, start=1)]
        first = 0
        for count, group in groupby(self.processed):
            last = first + len(list(group)) - 1
            out.append(Metric(f"layers {first}–{last}", count, "visual tokens", "processed"))
            first = last + 1
        out += [Metric("layer average", self.average(name), "visual tokens", name) for name in get_args(Average)]
        for text in (False, True):
            tokens = "visual and text" if text else "visual tokens alone"
            for mlp in MLP_MATRICES:
                how, macs = f"4nd²+2n²d+{mlp}, {tokens}", self.macs(mlp=mlp, text=text)
                out.append(Metric("prefill", macs / 1e12, "TMAC", how))
                out.append(Metric("prefill", MACS_TO_FLOPS * macs / 1e12, "TFLOP", how))
                out.append(Metric("prefill, share of unpruned", 100 * self.macs_ratio(mlp=mlp, text=text), "%", how))
            size = self.kv_bytes(text=text)
            out.append(Metric("KV cache", size / 1e6, "MB", f"exact, {tokens}"))
            out.append(Metric("KV cache", size / 2**20, "MiB", f"exact, {tokens}"))
            out.append(Metric("KV cache, share of unpruned", 100 * self.kv_ratio(text=text), "%", f"exact, {tokens}"))
        rounded = "a rounded constant times the tokens kept last"
        out.append(Metric("KV cache", self.kv_rounded_mb(), "MB", rounded))
        return tuple(out)


def cost_of(pruner: Pruner, model: ModelShape) -> Cost:
    """The cost of a prompt under a method, without running a model.

    Raises `DartLabError` for a method whose number of tokens depends on the picture (measure it, then `Cost.of`), and
    for layers that the model does not have.

    >>> from dart_lab.pruners import DART
    >>> shape = ModelShape(layers=32, width=4096, mlp_width=11008, heads=32, kv_heads=32, head_dim=128, visual=576)
    >>> cost_of(DART(keep=128, budget="official"), shape).kept
    132
    """
    plan = planned(pruner, visual=model.visual, crops=model.crops, text=model.text)
    counted = Cost.of(plan.kept, model)
    cached = counted.cached if plan.cache is None else (plan.cache,) * model.layers
    return Cost(model=model, processed=counted.processed, cached=cached, asked=plan.asked, method=pruner.name)


def solve_keep(
    target: float, model: ModelShape, *, layers: tuple[int, ...] = (2,), shape: Curve = "flat",
    convention: Average = "processed",
) -> dict[int, int]:
    """The number of tokens from each layer on whose layer average is `target`, to the nearest token.

    Args:
        target: layer average asked for.
        model: its `layers` and `visual` count.
        layers: decoder layers before which tokens go; 0 is before the language model.
        shape: "flat": the same number at all of them; "halving": each half of the one before (PyramidDrop).
        convention: as in `Cost.average`.

    Returns:
        layer → tokens, as `Cost.of` and `Schedule` take them.

    Raises:
        DartLabError: no such numbers exist; names the nearest average that can be had.

    >>> shape = ModelShape(layers=32, width=4096, mlp_width=11008, heads=32, kv_heads=32, head_dim=128, visual=576)
    >>> solve_keep(192, shape), solve_keep(128, shape, layers=(2, 10, 20), shape="halving")
    ({2: 166}, {2: 184, 10: 92, 20: 46})
    """
    check_choice("solve_keep", "shape", shape, get_args(Curve))
    check_choice("solve_keep", "convention", convention, get_args(Average))
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= model.layers:
        raise DartLabError(f"layers={layers} must increase and lie between 0 and {model.layers - 1}")
    starts = [max(layer - (convention == "output"), 0) for layer in layers]
    spans = [end - start for start, end in zip(starts, [*starts[1:], model.layers], strict=True)]
    factors = [2 ** (len(layers) - 1 - i) if shape == "halving" else 1 for i in range(len(layers))]
    full, weight = starts[0] * model.visual, sum(s * f for s, f in zip(spans, factors, strict=True))
    unit = (Fraction(target) * model.layers - full) / weight  # tokens of the last stage
    least, most = Fraction(1, 2), Fraction(model.visual, factors[0])
    if not least <= unit <= most:
        nearest = (full + weight * (1 if unit < least else most)) / model.layers
        raise DartLabError(
            f"an average of {target} tokens over {model.layers} layers is out of reach with {model.visual} tokens "
            f"until layer {layers[0]}; the nearest is {float(nearest):.2f}{', or cut earlier' if unit < least else ''}"
        )
    return {layer: max(math.floor(unit * f + Fraction(1, 2)), 1) for layer, f in zip(layers, factors, strict=True)}


def _layer_macs(model: ModelShape, tokens: int, mlp: str) -> int:
    query, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projections = 2 * tokens * model.width * (query + keys)
    return projections + 2 * tokens**2 * query + MLP_MATRICES[mlp] * tokens * model.width * model.mlp_width


def _layer_kv_bytes(model: ModelShape) -> int:
    """Keys and values of one token in one layer."""
    return 2 * model.kv_heads * model.head_dim * model.value_bytes
