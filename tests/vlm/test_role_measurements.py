"""What the rules about roles measure, in every family, against dense attention and against taking a token away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.pruners.remove import Remove
from dart_lab.vlm.insert import prune
from dart_lab.vlm.leave_one_out import leave_one_out
from dart_lab.vlm.states import visual_states
from tests.vlm.common import IMAGE, ONE, THREE, TOKENS, batch, small_llava
from tests.vlm.families.zoo import FAMILIES, Zoo

LAYERS = (1, 3)


def hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def next_logits(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs, logits_to_keep=1).logits[:, -1].float()


@pytest.mark.parametrize("kind", FAMILIES, ids=str)
def test_the_effect_of_a_token_is_what_its_removal_changes(kind: Zoo) -> None:
    model, inputs = kind.model("sdpa"), kind.batch("padded")
    counts = torch.isin(inputs["input_ids"], torch.tensor(kind.visual)).sum(dim=1).tolist()
    numbers = [0, min(counts) - 1, max(counts) - 1]  # the last is missing from the shorter sample
    found, whole = leave_one_out(model, inputs, numbers=numbers), next_logits(model, inputs)
    for row, effect in enumerate(found):
        asked = [number for number in numbers if number < counts[row]]
        assert len(effect) == counts[row] and effect.isfinite().nonzero()[:, 0].tolist() == sorted(set(asked))
    for number in sorted(set(numbers)):
        gone = torch.zeros(len(counts), max(counts), dtype=torch.bool)
        gone[:, number] = torch.tensor([number < count for count in counts])
        with prune(model, Remove(mask=gone, where="input")):
            change = (next_logits(model, inputs) - whole).abs().amax(dim=1)
        for row, effect in enumerate(found):
            if number < counts[row]:
                assert float(effect[number]) == pytest.approx(float(change[row]), abs=1e-5) and effect[number] > 0


def test_all_tokens_are_left_out_one_after_the_other() -> None:
    model, inputs = small_llava(), batch(THREE)
    found = leave_one_out(model, inputs)
    hung = hooks(model)  # transformers hangs in its own
    assert [len(effect) for effect in found] == [TOKENS * count for count in THREE]
    assert all(bool((effect > 0).all()) for effect in found)
    for layer in model.model.language_model.layers:  # nobody reads anybody: nothing changes
        torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
    assert all(bool((effect == 0).all()) for effect in leave_one_out(model, inputs))
    with pytest.raises(DartLabError, match="tokens 0 to 31"):
        leave_one_out(model, inputs, numbers=[32])
    with pytest.raises(DartLabError, match="no visual tokens"):
        leave_one_out(model, {"input_ids": torch.tensor([[1, 7, 8]])})
    assert hooks(model) == hung


@pytest.mark.parametrize("kind", FAMILIES, ids=str)
def test_attention_that_every_head_pays_a_token(kind: Zoo) -> None:
    """The mean over the real queries that see it, which the first and the last token get alike."""
    inputs = kind.batch("padded")
    found = visual_states(kind.model("sdpa"), inputs, LAYERS, received=True, column_sums=True)
    with torch.no_grad():
        dense = kind.model("eager")(**inputs, output_attentions=True).attentions
    real = inputs["attention_mask"].bool()
    for row, states in enumerate(found):
        visual = torch.isin(inputs["input_ids"][row], torch.tensor(kind.visual))
        for layer in LAYERS:
            weights = dense[layer][row][:, real[row]]
            sees = (torch.arange(len(visual))[None] <= torch.arange(len(visual))[real[row]][:, None]).sum(dim=0)
            mean = weights.sum(dim=1) / sees.clamp(min=1)
            assert states.received[layer].shape == (mean.shape[0], len(states.embeds))
            torch.testing.assert_close(states.received[layer], mean[:, visual], atol=1e-6, rtol=0)
        assert (states.column_sums is None) == (kind.name != "llava")  # there alone each token is one patch


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_column_sums_are_those_of_the_block_that_makes_the_features(images: tuple[int, ...]) -> None:
    model, inputs = small_llava(vision_layers=3), batch(images)
    found = visual_states(model, inputs, column_sums=True)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        dense = model.model.vision_tower(inputs["pixel_values"], output_attentions=True).attentions[-2]
    sums = dense.mean(dim=1).sum(dim=1)[:, 1:].flatten().split([TOKENS * count for count in images])
    for states, expected in zip(found, sums, strict=True):
        assert states.column_sums is not None
        torch.testing.assert_close(states.column_sums, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_the_first_token_is_the_first_real_one(images: tuple[int, ...]) -> None:
    model, inputs = small_llava(), batch(images)
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    for row, states in enumerate(visual_states(model, inputs, LAYERS)):
        start = int(inputs["attention_mask"][row].argmax())
        assert all(torch.equal(states.first[layer], hidden[layer][row, start]) for layer in LAYERS)
    cut = {"input_ids": inputs["input_ids"][:1], "pixel_values": inputs["pixel_values"][: images[0]]}
    begin = int((cut["input_ids"][0] == IMAGE).nonzero()[0])
    cut["input_ids"] = cut["input_ids"][:, begin:]
    assert visual_states(model, cut, LAYERS)[0].first == {}


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_features_are_never_those_of_another_picture(name: str) -> None:
    """88 + 72 tokens of two prompts are as many as 2 × 80 patches, but newlines are none of them."""
    kind = next(kind for kind in FAMILIES if kind.name == name)
    model, sizes = kind.model("sdpa"), [(32, 32), (24, 32), (32, 24), (30, 20), (50, 50), (20, 30)]
    for one in sizes:
        for other in sizes:
            inputs = kind.build_batch([[one], [other]])
            for states in visual_states(model, inputs, column_sums=True):
                assert states.vision is None and states.column_sums is None


def test_half_precision_is_warned_of() -> None:
    model, inputs = small_llava().to(torch.bfloat16), batch(ONE)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    with pytest.warns(DartLabWarning, match="load it in float32"):
        leave_one_out(model, inputs, numbers=[0])
