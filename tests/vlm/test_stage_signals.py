"""Attention that methods read, against the maps that eager attention returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dart_lab.pruners import Pruner, Signals
from dart_lab.pruners.base import Stage
from dart_lab.pruners.reduction import Reduction
from dart_lab.vlm import providers
from dart_lab.vlm.insert import prune
from tests.vlm.by_hand import Decoder, input_embeddings
from tests.vlm.common import ONE, THREE, alone, batch, small_llava


@dataclass(frozen=True, kw_only=True)
class Spy(Pruner):
    """Keeps everything, and notes whole maps."""

    name: ClassVar[str] = "spy"

    where: Stage
    maps: tuple[str, ...] = ("attention",)
    seen: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def _needs_keep(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({*self.maps, "received"})

    @property
    def stage(self) -> Stage:
        return self.where

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        every = torch.arange(signals.attended.shape[1]).expand(len(signals.attended), -1)
        for name in self.maps:
            self.seen[name] = signals.attention(every, of=name)
            some = every[:, [3, 0, -1]]
            torch.testing.assert_close(signals.attention(some, of=name), self.seen[name][:, :, [3, 0, -1]])
        self.seen["received"], self.seen["attended"] = signals.get("received"), signals.attended
        return Reduction.from_mask(signals.valid, signals.counts)


def eager_maps(model: Any, **inputs: Tensor) -> tuple[Tensor, ...]:
    """Of every layer: `(batch, heads, queries, keys)`, as the model itself returns them."""
    model.set_attn_implementation("eager")
    out: tuple[Tensor, ...] = model(**inputs, output_attentions=True).attentions
    return out


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("backend", "within"), [("eager", 1e-6), ("sdpa", 1e-5)])  # sdpa: other states before it
@torch.no_grad()
def test_rows_are_those_of_eager_attention(
    backend: str, within: float, kv_heads: int, images: tuple[int, ...]
) -> None:
    model, inputs = small_llava(kv_heads=kv_heads, attention=backend), batch(images)
    spy = Spy(where=Stage("LLM_LAYER", 2), maps=("attention", "attention_ahead"))
    with prune(model, spy):
        model(**inputs)
    maps, real = eager_maps(model, **inputs), inputs["attention_mask"].bool()
    for name, layer in (("attention", 1), ("attention_ahead", 2)):
        for row in range(len(images)):
            got, want = spy.seen[name][row][:, real[row]], maps[layer][row][:, real[row]]
            torch.testing.assert_close(got, want, atol=within, rtol=0)
    sums = (maps[1].mean(dim=1) * real[:, :, None]).sum(dim=1)
    torch.testing.assert_close(spy.seen["received"][real], sums[real], atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_of_the_tower_are_those_of_eager_attention() -> None:
    model, inputs = small_llava(vision_layers=3), batch((2,))
    spy = Spy(where=Stage("VISION_OUT"), maps=("attention", "attention@0"))
    with prune(model, spy):
        model(**inputs)
    maps = eager_maps(model.model.vision_tower, pixel_values=inputs["pixel_values"])
    for name, block in (("attention", 1), ("attention@0", 0)):  # the features are the output of block 1
        torch.testing.assert_close(spy.seen[name], maps[block], atol=1e-6, rtol=0)
    torch.testing.assert_close(spy.seen["received"], maps[1].mean(dim=1).sum(dim=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows_at_once", [1, 5, 1000])
@torch.no_grad()
def test_chunked_column_sums_are_those_of_the_whole_map(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_ROWS_AT_ONCE", rows_at_once)
    model, inputs = small_llava(kv_heads=2), batch(THREE)
    spy = Spy(where=Stage("LLM_LAYER", 2))
    with prune(model, spy):
        model(**inputs)
    for row in range(len(THREE)):
        decoder, embeds = Decoder(model.model.language_model), input_embeddings(model, alone(inputs, THREE, row))
        decoder.run(embeds, torch.arange(len(embeds)), range(2))
        got = spy.seen["received"][row, spy.seen["attended"][row]]
        torch.testing.assert_close(got, decoder.received[1], atol=1e-5, rtol=0)
