"""Stages in front of the language model and in its cache, against models that are fed the short prompt by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners import ToMe
from dart_lab.pruners.mustdrop import MustDrop
from dart_lab.pruners.registry import make_pruner
from dart_lab.vlm.insert import prune
from dart_lab.vlm.select import select
from tests.vlm.common import IMAGE, ONE, THREE, TOKENS, batch, small_llava

DROPPING = ("divprune", "fastervlm", "vispruner")
MERGING = ("visionzip", "pooling", "tome", "mustdrop")
STEPS, KEEP = 6, 5


def method(name: str) -> Any:
    if name == "tome":
        return ToMe(keep=KEEP, blocks=2)
    if name == "mustdrop":
        return MustDrop(layers=(2, 3), similarity=0.2, window=2, global_share=0.02, individual=0.08, key_share=0.1)
    return make_pruner(name, keep=KEEP)


def model_for(backend: str) -> Any:
    return small_llava(attention=backend, vision_layers=3)


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    inputs = {name: tensor for name, tensor in inputs.items() if name != "position_ids"}  # older ones repeat
    return model.generate(
        **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, suppress_tokens=[IMAGE],
        output_logits=True, return_dict_in_generate=True, **options,
    )


def worst(first: Any, second: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first.logits, second.logits, strict=True))


def embeddings(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the language model receives for a prompt, pictures in place: `(batch, sequence, channels)`."""
    seen: dict[str, Tensor] = {}
    text = model.model.language_model
    hook = text.register_forward_pre_hook(lambda _, __, k: seen.update(e=k["inputs_embeds"]), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen["e"]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("name", DROPPING)
def test_dropping_equals_feeding_the_short_prompt(name: str, images: tuple[int, ...], backend: str) -> None:
    model, inputs, pruner = model_for(backend), batch(images), method(name)
    full = embeddings(model, inputs)
    with prune(model, pruner) as run:
        pruned = generate(model, inputs)
    for row, count in enumerate(images):
        ids = inputs["input_ids"][row]
        stays = (ids != IMAGE) & inputs["attention_mask"][row].bool()
        stays[torch.from_numpy(run.positions[row])] = True
        short = full[row : row + 1, stays]
        alone = model.generate(
            inputs_embeds=short, attention_mask=torch.ones(short.shape[:2], dtype=torch.long), max_new_tokens=STEPS,
            min_new_tokens=STEPS, do_sample=False, suppress_tokens=[IMAGE], output_logits=True,
            return_dict_in_generate=True,
        )
        for ours, theirs in zip(pruned.logits, alone.logits, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], atol=1e-5, rtol=0)
        assert run.got[row] == KEEP * (1 if name == "divprune" else count)


@pytest.mark.parametrize("name", DROPPING + MERGING)
def test_cache_or_not_static_or_not_the_answer_is_the_same(name: str) -> None:
    model, inputs, pruner = model_for("sdpa"), batch(THREE), method(name)
    with prune(model, pruner) as run:
        cached = generate(model, inputs)
    assert len(run.samples) == len(THREE)
    if name == "mustdrop":  # it clears the cache, so there must be one, and one that can shrink
        for options in ({"use_cache": False}, {"cache_implementation": "static"}):
            with prune(model, pruner), pytest.raises(DartLabError, match="cache"):
                generate(model, inputs, **options)
        return
    for options in ({"use_cache": False}, {"cache_implementation": "static"}):
        with prune(model, pruner) as again:
            assert worst(generate(model, inputs, **options), cached) <= 1e-5, options
        assert len(again.samples) == len(THREE)
        assert [k.tolist() for k in again.kept] == [k.tolist() for k in run.kept]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MERGING)
def test_a_row_is_what_it_is_alone(name: str, backend: str) -> None:
    model, pruner, images = model_for(backend), method(name), (1, 1, 1)
    inputs = batch(images)
    with prune(model, pruner) as run:
        together = generate(model, inputs)
    for row in range(len(images)):
        real = inputs["attention_mask"][row].bool()
        alone = {
            "input_ids": inputs["input_ids"][row : row + 1, real],
            "attention_mask": inputs["attention_mask"][row : row + 1, real],
            "pixel_values": inputs["pixel_values"][row : row + 1],
        }
        with prune(model, pruner) as single:
            by_itself = generate(model, alone)
        assert single.kept[0].tolist() == run.kept[row].tolist()
        for ours, theirs in zip(together.logits, by_itself.logits, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["visionzip", "tome"])
def test_every_patch_is_in_exactly_one_kept_token(name: str) -> None:
    model, inputs = model_for("sdpa"), batch(ONE)
    with torch.no_grad(), prune(model, method(name)) as run:
        model(**inputs)
    made_of = run.samples[0].patches()
    assert made_of.shape == (len(run.kept[0]), TOKENS)
    assert made_of.sum(axis=0).max() == 1
    assert (made_of.any(axis=0)).all()
    assert run.asked == run.got == [KEEP]  # VisionZip's class token is counted, and is no patch
    assert len(run.kept[0]) == (KEEP - 1 if name == "visionzip" else KEEP)


def test_a_kept_class_token_reaches_the_language_model_through_the_projector() -> None:
    model, inputs = model_for("sdpa"), batch(ONE)
    tower, seen = model.model.vision_tower, {}
    with torch.no_grad(), prune(model, method("visionzip")) as run:
        projector = model.model.multi_modal_projector
        hook = projector.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))  # behind ours
        model(**inputs)
        hook.remove()
    with torch.no_grad():
        layers = tower(inputs["pixel_values"], output_hidden_states=True).hidden_states
        states = layers[model.config.vision_feature_layer]
    place = int(run.notes()["class_token_place"][0])
    assert place not in run.kept[0]
    torch.testing.assert_close(seen["x"][0, place], states[0, 0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", DROPPING + ("visionzip",))
def test_select_says_what_prune_does(name: str) -> None:
    model, inputs = model_for("sdpa"), batch(THREE)
    with torch.no_grad(), prune(model, method(name)) as run:
        model(**inputs)
    found = select(model, inputs, [method(name), make_pruner("fastv", keep=7)])
    assert [k.tolist() for k in found[0].kept] == [k.tolist() for k in run.kept]
    assert found[1].got == [7] * len(THREE)


def test_select_refuses_methods_of_several_stages() -> None:
    with pytest.raises(DartLabError, match="several stages"):
        select(model_for("sdpa"), batch(ONE), [method("tome")])


def test_beams_count_a_prompt_once() -> None:
    model, inputs = model_for("sdpa"), batch(THREE)
    for name in ("divprune", "fastervlm", "tome"):
        with prune(model, method(name)) as run:
            generate(model, inputs, num_beams=2)
        assert len(run.samples) == len(THREE), name


def patched(model: Any) -> list[str]:
    """Modules whose forward is not their class's."""
    found = []
    for name, module in model.named_modules():
        forward = vars(module).get("forward", type(module).forward)
        if getattr(forward, "__func__", forward) is not type(module).forward:
            found.append(name)
    return found


def test_blocks_and_hooks_are_as_before_also_after_an_exception() -> None:
    model, inputs = model_for("sdpa"), batch(ONE)
    with torch.no_grad():
        before = model(**inputs).logits
    own = patched(model)
    for name in ("tome", "visionzip", "divprune", "mustdrop"):
        with pytest.raises(ZeroDivisionError), prune(model, method(name)):
            generate(model, inputs)
            raise ZeroDivisionError
        assert patched(model) == own, name
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, before), name


def test_a_block_behind_the_features_has_no_effect_and_is_refused() -> None:
    model = model_for("sdpa")
    with pytest.raises(DartLabError, match="no effect"), prune(model, ToMe(keep=KEEP, blocks=3)):
        model(**batch(ONE))


def test_the_cache_is_cleared_of_what_a_later_layer_dropped() -> None:
    model, inputs = model_for("sdpa"), batch((1, 1))
    with prune(model, method("mustdrop")) as run:
        generate(model, inputs)
    final = [len(kept) for kept in run.kept]
    assert set(run.cached) == {1, 2, 3}
    assert all(counts == final for counts in run.cached.values())
