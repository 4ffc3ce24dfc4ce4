"""States of visual tokens against the model's own outputs."""

from __future__ import annotations

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.vlm.states import text_states, visual_states
from tests.vlm.common import IMAGE, ONE, THREE, TOKENS, batch, small_llava


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_states_are_those_of_the_model(images: tuple[int, ...]) -> None:
    model, inputs = small_llava(), batch(images)
    found = visual_states(model, inputs, [1, 3])
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
        tower = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True)
    features = tower.hidden_states[-2][:, 1:].flatten(0, 1).split([TOKENS * count for count in images])
    for row, states in enumerate(found):
        visual = inputs["input_ids"][row] == IMAGE
        assert torch.equal(states.embeds, hidden[0][row][visual])
        assert list(states.layers) == [1, 3]
        assert torch.equal(states.layers[3], hidden[3][row][visual])
        assert states.vision is not None and torch.equal(states.vision, features[row])
        assert len(states.tokens) == TOKENS * images[row]


def test_nothing_runs_after_the_deepest_layer_and_nothing_is_left() -> None:
    model, inputs, ran = small_llava(), batch(ONE), []
    for index, layer in enumerate(model.model.language_model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    visual_states(model, inputs, [2])
    assert ran == [0, 1]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    assert sum(hooks) == 0


def test_text_alone_gives_the_states_of_the_language_model() -> None:
    model = small_llava()
    found = text_states(model, [[1, 7, 8], [1]], [0, 2])
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([[1, 7, 8]]), output_hidden_states=True).hidden_states
    assert torch.equal(found[0], torch.stack([hidden[0][0], hidden[2][0]]))
    assert found[1].shape == (2, 1, 32)


def test_errors_say_what_is_missing() -> None:
    model, inputs = small_llava(), batch(ONE)
    with pytest.raises(DartLabError, match="layers 0 to 3"):
        visual_states(model, inputs, [4])
    with pytest.raises(DartLabError, match="no visual tokens"):
        visual_states(model, {"input_ids": torch.tensor([[1, 7, 8]])})
    with pytest.raises(DartLabError, match="without tokens"):
        text_states(model, [[]], [0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_attention_is_that_of_the_text_behind_the_picture(images: tuple[int, ...], attention: str) -> None:
    model, inputs = small_llava(attention=attention), batch(images)
    found = visual_states(model, inputs, [1, 3], attention=True)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        dense = model(**inputs, output_attentions=True).attentions
    for row, states in enumerate(found):
        visual = (inputs["input_ids"][row] == IMAGE).nonzero()[:, 0]
        place = torch.arange(inputs["input_ids"].shape[1])
        text = (place > visual[-1]) & inputs["attention_mask"][row].bool()
        assert list(states.attention) == [1, 3]
        for layer in (1, 3):
            share = dense[layer][row].mean(dim=0)[text][:, visual].mean(dim=0)
            assert torch.allclose(states.attention[layer], share / share.sum(), atol=1e-6)
    assert all(states.attention == {} for states in visual_states(model, inputs, [1]))


def test_attention_needs_a_reader() -> None:
    model, inputs = small_llava(), batch(ONE)
    last = int((inputs["input_ids"][0] == IMAGE).nonzero()[-1]) + 1
    cut = {name: value[:, :last] if value.dim() == 2 else value for name, value in inputs.items()}
    with pytest.raises(DartLabError, match="no text stands behind"):
        visual_states(model, cut, [1], attention=True)
