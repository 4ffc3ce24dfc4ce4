"""Merging inside the decoder and in its caches, and positions in front of it, against plain loops and plain calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dart_lab.pruners import ElasticCache, Pruner, ScorePruner, Signals
from dart_lab.pruners.base import PositionPolicy, Stage
from dart_lab.pruners.reduction import Merge, Reduction, mask_to_rows
from dart_lab.pruners.staged import Staged
from dart_lab.vlm.insert import prune
from tests.vlm.by_hand import Decoder, input_embeddings
from tests.vlm.common import IMAGE, ONE, THREE, alone, batch, small_llava
from tests.vlm.stepping import cache_from, cache_name, decode

STEPS, LAYERS = 6, 4


def known_weights(n: int) -> Tensor:
    """`(n / 4, n)`: of every four tokens the last one stays; a weighted mean of all, or, at odd ones, others only."""
    weights = torch.zeros(n // 4, n)
    for slot in range(n // 4):
        weights[slot, 4 * slot : 4 * slot + 4] = torch.tensor([0.5, 0.8, 0, 0] if slot % 2 else [0.1, 0.2, 0.3, 0.4])
    return weights


@dataclass(frozen=True, kw_only=True)
class Known(Pruner):
    """Merges by known weights."""

    name: ClassVar[str] = "known"
    needs: ClassVar[frozenset[str]] = frozenset()

    def _needs_keep(self) -> bool:
        return False

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        place = torch.arange(signals.visual.shape[1])
        keep = mask_to_rows((place % 4 == 3) & signals.valid)
        weights = known_weights(len(place)).expand(len(keep), -1, -1) * signals.valid[:, None]
        return Reduction(keep=keep, size=signals.counts, asked=asked, merge=Merge.from_dense(weights))


@dataclass(frozen=True, kw_only=True)
class KnownCompact(Known):
    positions: ClassVar[PositionPolicy] = "compact"


def visual_places(ids: Tensor) -> Tensor:
    return (ids == IMAGE).nonzero()[:, 0]


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("method", [Known, KnownCompact], ids=["original", "compact"])
@torch.no_grad()
def test_merging_between_two_layers(method: type[Known], layer: int, images: tuple[int, ...]) -> None:
    model, inputs = small_llava(kv_heads=2), batch(images)
    with prune(model, method(layer=layer)) as run:
        steps = decode(model, inputs, STEPS)
    for row in range(len(images)):
        single = alone(inputs, images, row)
        embeds, visual = input_embeddings(model, single), visual_places(single["input_ids"][0])
        weights, n = known_weights(len(visual)), len(embeds)
        assert run.samples[row].patches().tolist() == (weights != 0).tolist()

        decoder, before, after = Decoder(model.model.language_model), range(layer), range(layer, LAYERS)
        states = decoder.run(embeds, torch.arange(n), before)
        merged = states.clone()
        merged[visual[3::4]] = weights @ states[visual]
        stays = torch.ones(n, dtype=torch.bool)
        stays[visual] = False
        stays[visual[3::4]] = True
        places = stays.nonzero()[:, 0]
        compact = method is KnownCompact
        logits = [decoder.last(model, decoder.run(
            merged[stays], torch.arange(len(places)) if compact else places, after
        ))]
        for step, token in enumerate(steps.tokens[row]):
            state = decoder.run(model.get_input_embeddings()(token[None]), torch.tensor([n + step]), before)
            at = len(places) if compact else n
            logits.append(decoder.last(model, decoder.run(state, torch.tensor([at + step]), after)))
        for ours, theirs in zip(steps.logits, logits, strict=True):
            torch.testing.assert_close(ours[row], theirs, atol=2e-5, rtol=1e-5)


@dataclass(frozen=True, kw_only=True)
class KnownTwice(Staged):
    """Sixteen tokens become four, and four one."""

    name: ClassVar[str] = "known-twice"
    needs: ClassVar[frozenset[str]] = frozenset()

    def _needs_keep(self) -> bool:
        return False

    def parts(self) -> tuple[Pruner, ...]:
        return (Known(layer=1), KnownCompact(layer=3))


@torch.no_grad()
def test_patches_behind_tokens_that_were_merged_twice() -> None:
    model, inputs = small_llava(), batch(THREE)
    with prune(model, KnownTwice()) as run:
        model(**inputs)
    for sample in run.samples:
        n = len(sample.tokens)
        through = known_weights(n // 4) @ known_weights(n)
        assert sample.patches().tolist() == (through != 0).tolist()
        assert sample.kept.tolist() == list(range(15, n, 16))


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("keep", [2, 9, 20])
@torch.no_grad()
def test_caches_merged_around_their_anchors(keep: int, backend: str, images: tuple[int, ...]) -> None:
    model, inputs = small_llava(kv_heads=2, attention=backend), batch(images)
    with prune(model, ElasticCache(keep=keep)) as run:
        steps = decode(model, inputs, STEPS)
    assert run.cached == {layer: [keep] * len(images) for layer in range(1, LAYERS)}
    for row in range(len(images)):
        embeds = input_embeddings(model, alone(inputs, images, row))
        n, decoder = len(embeds), Decoder(model.model.language_model)
        logits = [decoder.last(model, decoder.run(embeds, torch.arange(n), range(LAYERS)))]
        for layer in range(1, LAYERS):
            received = decoder.received[layer].tolist()
            inner = sorted(range(1, n - 1), key=lambda i: (-received[i], i))[: keep - 2]
            anchors = sorted([0, n - 1, *inner])
            home = torch.tensor([min(range(keep), key=lambda a: (abs(anchors[a] - i), a)) for i in range(n)])
            for held in (decoder.keys, decoder.values):
                held[layer] = torch.stack([held[layer][home == anchor].mean(dim=0) for anchor in range(keep)])
        for step, token in enumerate(steps.tokens[row]):
            embed = model.get_input_embeddings()(token[None])
            logits.append(decoder.last(model, decoder.run(embed, torch.tensor([n + step]), range(LAYERS))))
        for ours, theirs in zip(steps.logits, logits, strict=True):
            torch.testing.assert_close(ours[row], theirs, atol=2e-5, rtol=1e-5)


@dataclass(frozen=True, kw_only=True)
class InFront(ScorePruner):
    """Keeps the tokens with the largest first channel, in front of the language model."""

    name: ClassVar[str] = "in-front"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})

    @property
    def stage(self) -> Stage:
        return Stage("LLM_IN")

    def score(self, signals: Signals) -> Tensor:
        return signals.get("hidden")[:, :, 0].gather(1, signals.visual.clamp(min=0))


@dataclass(frozen=True, kw_only=True)
class InFrontCompact(InFront):
    positions: ClassVar[PositionPolicy] = "compact"


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("method", [InFront, InFrontCompact], ids=["original", "compact"])
@torch.no_grad()
def test_positions_in_front_of_the_language_model(
    method: type[InFront], images: tuple[int, ...], backend: str
) -> None:
    """The short prompt and every step after it, handed to the model with explicit positions."""
    model, inputs = small_llava(attention=backend), batch(images)
    with prune(model, method(keep=5)) as run:
        steps = decode(model, inputs, STEPS)
    assert run.got == [5] * len(images)
    for row in range(len(images)):
        single = alone(inputs, images, row)
        embeds, visual = input_embeddings(model, single), visual_places(single["input_ids"][0])
        stays = torch.ones(len(embeds), dtype=torch.bool)
        stays[visual] = False
        best = sorted(range(len(visual)), key=lambda i: (-float(embeds[visual[i], 0]), i))[:5]
        stays[visual[best]] = True
        assert sorted(best) == run.kept[row].tolist()
        places = stays.nonzero()[:, 0]
        positions = places if method is InFront else torch.arange(len(places))
        after = len(embeds) if method is InFront else len(places)
        for ours, theirs in zip(
            steps.logits, explicit(model, embeds[stays], positions, after, steps.tokens[row]), strict=True
        ):
            torch.testing.assert_close(ours[row], theirs, atol=2e-5, rtol=1e-5)


def explicit(model: Any, embeds: Tensor, positions: Tensor, after: int, tokens: Tensor) -> list[Tensor]:
    """Logits of a prompt at `positions` and of every token behind it, at `after`, `after` + 1 …"""
    out = model(
        inputs_embeds=embeds[None], position_ids=positions[None], use_cache=True,
        attention_mask=torch.ones(1, len(embeds), dtype=torch.long),
    )
    logits = [out.logits[0, -1]]
    for step, token in enumerate(tokens):
        out = model(
            input_ids=token[None, None], position_ids=torch.tensor([[after + step]]), use_cache=True,
            attention_mask=torch.ones(1, len(embeds) + step + 1, dtype=torch.long),
            **{cache_name(model): cache_from(out)},
        )
        logits.append(out.logits[0, -1])
    return logits
