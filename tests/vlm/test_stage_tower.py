"""Merging inside the vision tower, against a plain loop over its blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dart_lab.pruners import ToMe
from dart_lab.pruners.mustdrop import MustDrop, MustDropWindows
from dart_lab.vlm.insert import prune
from tests.twins import cosine_twin
from tests.vlm.by_hand import Decoder, clip_attention, clip_mlp, patches_of, prompt_with, tower_of
from tests.vlm.common import GRID, ONE, THREE, TOKENS, alone, batch, small_llava
from tests.vlm.stepping import decode

BLOCKS, STEPS = 2, 4  # the features are the output of block 1 of 3


def tome_step(keys: Tensor, merges: int) -> tuple[list[int], dict[int, list[int]]]:
    """Slots in order, and the tokens of each: even tokens but the class token go to the odd one they resemble most."""
    odd = range(1, len(keys), 2)
    pairs = []
    for even in range(2, len(keys), 2):
        like = {token: cosine_twin(keys[even], keys[token]) for token in odd}
        target = max(odd, key=lambda token: (like[token], -token))
        pairs.append((like[target], even, target))
    gone = {even: target for _, even, target in sorted(pairs, key=lambda p: (-p[0], p[1]))[:merges]}
    slots = [even for even in range(0, len(keys), 2) if even not in gone] + list(odd)
    return slots, {slot: [slot, *(even for even, target in gone.items() if target == slot)] for slot in slots}


def tome_by_hand(model: Any, pixels: Tensor, merges: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Features of the patches that are left, in raster order, and which patches each is made of."""
    states = patches_of(model, pixels)
    sizes, place = torch.ones(len(states)), list(range(len(states)))
    made_of = torch.eye(len(states), dtype=torch.bool)
    for block, r in zip(tower_of(model).encoder.layers, merges, strict=False):
        states, keys = clip_attention(block, states, sizes.log())
        slots, members = tome_step(keys, r)
        weighted = sizes[:, None] * states
        total = torch.stack([sizes[members[slot]].sum() for slot in slots])
        states = torch.stack([weighted[members[slot]].sum(dim=0) for slot in slots]) / total[:, None]
        made_of = torch.stack([made_of[members[slot]].any(dim=0) for slot in slots])
        sizes, place = total, [place[slot] for slot in slots]
        states = clip_mlp(block, states)
    assert place[0] == 0 and made_of[0].sum() == 1, "the class token stays first and alone"
    raster = sorted(range(1, len(place)), key=lambda slot: place[slot])
    return states[raster], made_of[raster][:, 1:]


def windows_by_hand(model: Any, pixels: Tensor, side: int, threshold: float) -> tuple[Tensor, Tensor]:
    """The same for alike windows of `side` × `side` patches that become their mean in the first block."""
    first, *later = tower_of(model).encoder.layers[:BLOCKS]
    states, _ = clip_attention(first, patches_of(model, pixels))
    groups = {0: [0]} | {token: [token] for token in range(1, TOKENS + 1)}
    for row in range(0, GRID, side):
        for column in range(0, GRID, side):
            inside = [1 + (row + i) * GRID + column + j for i in range(side) for j in range(side)]
            pairs = [cosine_twin(states[i], states[j]) for i in inside for j in inside if i != j]
            if sum(pairs) / len(pairs) >= threshold:
                groups[inside[0]] = inside
                for token in inside[1:]:
                    del groups[token]
    made_of = torch.zeros(len(groups), TOKENS + 1, dtype=torch.bool)
    for slot, members in enumerate(groups.values()):
        made_of[slot, members] = True
    states = clip_mlp(first, torch.stack([states[members].mean(dim=0) for members in groups.values()]))
    for block in later:
        states = clip_mlp(block, clip_attention(block, states)[0])
    return states[1:], made_of[1:, 1:]


def answers_by_hand(model: Any, ids: Tensor, features: list[Tensor], tokens: Tensor) -> list[Tensor]:
    """Logits of the prompt and of every forced token, positions without gaps."""
    text, table = model.model.language_model, model.get_input_embeddings()
    decoder, layers = Decoder(text), range(len(text.layers))
    states = prompt_with(model, ids, [model.model.multi_modal_projector(part[None])[0] for part in features])
    logits, at = [decoder.last(model, decoder.run(states, torch.arange(len(states)), layers))], len(states)
    for step, token in enumerate(tokens):
        states = decoder.run(table(token[None]), torch.tensor([at + step]), layers)
        logits.append(decoder.last(model, states))
    return logits


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("merges", [(6, 5), (3, 0), (8, 4)])
@torch.no_grad()
def test_token_merging_block_by_block(merges: tuple[int, ...], images: tuple[int, ...], backend: str) -> None:
    model, inputs = small_llava(vision_layers=3, attention=backend), batch(images)
    with prune(model, ToMe(r=merges, blocks=BLOCKS)) as run:
        steps = decode(model, inputs, STEPS)
    for row in range(len(images)):
        single = alone(inputs, images, row)
        by_hand = [tome_by_hand(model, pixels, merges) for pixels in single["pixel_values"]]
        made_of = torch.block_diag(*(part.float() for _, part in by_hand)).bool()
        assert run.samples[row].patches().tolist() == made_of.tolist()
        assert run.got[row] == len(made_of) == images[row] * (TOKENS - sum(merges))
        hand = answers_by_hand(model, single["input_ids"][0], [part for part, _ in by_hand], steps.tokens[row])
        for ours, theirs in zip(steps.logits, hand, strict=True):
            torch.testing.assert_close(ours[row], theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.07])
@torch.no_grad()
def test_alike_windows_in_the_first_block(threshold: float, images: tuple[int, ...]) -> None:
    model, inputs = small_llava(vision_layers=3), batch(images)
    with prune(model, MustDropWindows(window=2, similarity=threshold)) as run:
        steps = decode(model, inputs, STEPS)
    for row in range(len(images)):
        single = alone(inputs, images, row)
        by_hand = [windows_by_hand(model, pixels, 2, threshold) for pixels in single["pixel_values"]]
        made_of = torch.block_diag(*(part.float() for _, part in by_hand)).bool()
        assert run.samples[row].patches().tolist() == made_of.tolist()
        merged = int((made_of.sum(dim=1) == 4).sum())
        assert run.got[row] == images[row] * TOKENS - 3 * merged
        hand = answers_by_hand(model, single["input_ids"][0], [part for part, _ in by_hand], steps.tokens[row])
        for ours, theirs in zip(steps.logits, hand, strict=True):
            torch.testing.assert_close(ours[row], theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("keep", [None, 6])
@torch.no_grad()
def test_key_tokens_survive_every_stage(keep: int | None) -> None:
    """Whatever the text looks at: patches that the class token attends to most are in the last layer, and its cache."""
    model, inputs = small_llava(vision_layers=3), batch((1, 1))
    method = MustDrop(keep=keep, layers=(2, 3), similarity=0.0, window=2, global_share=1.0, individual=1.0,
                      key_share=0.3)  # these thresholds drop everything else
    with prune(model, method) as run:
        decode(model, inputs, 1)
    for row, sample in enumerate(run.samples):
        behind_tower = sample.decisions[0]
        keys = behind_tower.kept[behind_tower.notes["key_tokens"][: len(behind_tower.kept)]]
        assert len(keys) == math.ceil(0.3 * len(behind_tower.kept)) > 1
        assert set(keys) <= set(sample.kept) and len(sample.kept) == (keep or len(keys))
        assert {counts[row] for counts in run.cached.values()} == {len(sample.kept)}
