"""Sharing a prefix changes no answer: every method, several layers, padded batches, decoding included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners import (
    DART,
    Alpha,
    CDPruner,
    FastV,
    Pruner,
    Random,
    UniformGrid,
    make_pruner,
    parse_pruner,
    pruner_names,
)
from dart_lab.pruners.fitting import UNFIT, Depth, fit
from dart_lab.studies.branch import Branch, branch
from dart_lab.vlm import compat
from dart_lab.vlm.branching import first_margin
from dart_lab.vlm.tap import Tap
from tests.vlm.common import IMAGE, ONE, THREE, TOKENS, Uneven, batch, small_llava
from tests.vlm.families.zoo import FAMILIES

LAYERS = 6
ONEVISION = next(kind for kind in FAMILIES if kind.name == "llava_onevision")


def model_of(**sizes: Any) -> Any:
    model = small_llava(layers=LAYERS, vision_layers=4, **sizes)
    model.generation_config.eos_token_id = None
    return model


def prompts(images: tuple[int, ...]) -> dict[str, torch.Tensor]:
    inputs = batch(images)
    del inputs["position_ids"]
    return inputs


def both(model: Any, inputs: Any, pruners: list[Pruner | None], **more: Any) -> tuple[list[Branch], list[Branch]]:
    options = {"max_new_tokens": 5, "logits": True, **more}
    return branch(model, inputs, pruners, **options), branch(model, inputs, pruners, share=False, **options)


def agree(shared: list[Branch], alone: list[Branch], tolerance: float = 1e-5) -> None:
    for one, other in zip(shared, alone, strict=True):
        assert one.logits is not None and other.logits is not None
        torch.testing.assert_close(one.logits, other.logits, atol=tolerance, rtol=0)
        assert torch.equal(one.tokens, other.tokens)
        best = one.logits[:, 0].sort(dim=-1, descending=True).values
        torch.testing.assert_close(one.margin, best[:, 0] - best[:, 1])
        torch.testing.assert_close(one.margin, other.margin, atol=2 * tolerance, rtol=0)
        assert [kept.tolist() for kept in one.run.kept] == [kept.tolist() for kept in other.run.kept]
        assert one.run.asked == other.run.asked and one.run.got == other.run.got
        for mine, theirs in zip(one.run.samples, other.run.samples, strict=True):
            for made, expected in zip(mine.decisions, theirs.decisions, strict=True):
                assert made.notes.keys() == expected.notes.keys()
                for name, note in made.notes.items():
                    np.testing.assert_allclose(note, expected.notes[name], rtol=1e-4, atol=1e-5)


def all_methods() -> list[Pruner]:
    depth = Depth(layers=LAYERS, blocks=3, visual=TOKENS)
    return [fit(name, keep=4, depth=depth) for name in pruner_names() if name not in UNFIT and name != "cdpruner"]


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_every_method_answers_as_it_does_alone(images: tuple[int, ...]) -> None:
    model, methods = model_of(), all_methods()
    if images == THREE:  # layouts of several pictures are no one square grid
        methods = [m for m in methods if m.name not in ("pooling", "feature-downsample", "ficoco-v", "mustdrop")]
    shared, alone = both(model, prompts(images), [None, *methods])
    agree(shared, alone)
    for pruner, one in zip(methods, shared[1:], strict=True):
        inside = all(part.stage.kind == "LLM_LAYER" for part in pruner.parts())
        assert one.shared == inside and bool(one.reason) != inside, pruner.name
    assert shared[0].shared and not any(one.shared for one in alone)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_layers_budgets_and_kinds_mix(images: tuple[int, ...], attention: str) -> None:
    model = model_of(attention=attention, kv_heads=2)
    pruners = [
        None, DART(keep=4), DART(keep=9), DART(keep=4, layer=4), FastV(keep=4), FastV(keep=4, layer=1),
        Random(keep=0.3),
        Alpha(keep=5, alpha=0.3), UniformGrid(keep=7, layer=5), Uneven(layer=3), make_pruner("none-kept"),
        make_pruner("keep-all"), DART(epsilon=0.2), parse_pruner("2:fastv:0.5;4:dart:0.25"), FastV(keep=4, rerank=True),
    ]  # fmt: skip
    shared, alone = both(model, prompts(images), pruners)
    agree(shared, alone)
    assert [one.reason for one in shared if not one.shared] == ["it ranks anew at every step"]


def test_the_prefix_runs_once_and_the_rest_as_one_batch() -> None:
    """Layers below 2 see each prompt once, whatever the number of conditions; the others see all of them together."""
    model, inputs, seen = model_of(), prompts(ONE), []
    text = model.model.language_model
    conditions: list[Pruner | None] = [Alpha(keep=4, alpha=a / 8) for a in range(9)]
    with Tap(dict(enumerate(text.layers)), lambda layer, c: seen.append((layer, *c.query.shape[::2]))):
        branch(model, inputs, conditions, max_new_tokens=1)
    length = inputs["input_ids"].shape[1]
    short = length - TOKENS + 4
    assert seen == [(0, 1, length), (1, 1, length)] + [(layer, 9, short) for layer in range(2, LAYERS)]


def test_conditions_of_unlike_length_do_not_pad_each_other() -> None:
    model, inputs, rows = model_of(), prompts(ONE), []
    conditions: list[Pruner | None] = [DART(keep=15), FastV(keep=1), FastV(keep=15), DART(keep=1)]
    with Tap({4: model.model.language_model.layers[4]}, lambda _, c: rows.append(tuple(c.query.shape[::2]))):
        branch(model, inputs, conditions, max_new_tokens=1)
    text = inputs["input_ids"].shape[1] - TOKENS
    assert rows == [(2, text + 1), (2, text + 15)]


def test_memory_decides_how_many_run_together_and_no_answer() -> None:
    model, inputs, rows = model_of(), prompts(THREE), []
    pruners: list[Pruner | None] = [DART(keep=n) for n in (3, 4, 5, 6)]
    whole = branch(model, inputs, pruners, logits=True, max_new_tokens=3)
    with Tap({3: model.model.language_model.layers[3]}, lambda _, c: rows.append(len(c.query))):
        small = branch(model, inputs, pruners, logits=True, max_new_tokens=3, memory=1)
    agree(small, whole)
    assert set(rows) == {3}, "one condition at a time"


def test_answers_end_where_they_end_alone() -> None:
    model = model_of()
    inputs = prompts(THREE)
    first = branch(model, inputs, [DART(keep=4)], max_new_tokens=6)[0].tokens
    model.generation_config.eos_token_id = int(first[1, 2])
    shared, alone = both(model, inputs, [DART(keep=4), FastV(keep=4)], max_new_tokens=6, logits=False)
    for one, other in zip(shared, alone, strict=True):
        assert torch.equal(one.tokens[:, : other.tokens.shape[1]], other.tokens)
        assert int((one.tokens[1] == model.generation_config.eos_token_id).sum()) >= 1
    assert bool((shared[0].tokens[1, 3:] == 0).all()), "padding follows the end"


def test_broken_logits_have_no_margin() -> None:
    broken = torch.tensor([[0.0, 3.0, 1.0], [0.0, float("nan"), 1.0]])
    margin = first_margin(broken)
    assert float(margin[0]) == 2.0 and bool(margin[1].isnan())


def test_nothing_is_left_on_the_model_also_after_an_error() -> None:
    model, inputs = model_of(), prompts(ONE)

    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())

    tower = model.model.vision_tower
    with torch.no_grad():
        before, hung, own = model(**inputs).logits, hooks(), set(vars(tower))
    branch(model, inputs, [None, DART(keep=4), make_pruner("tome", keep=4, blocks=3)], max_new_tokens=2)
    with pytest.raises(DartLabError):
        branch(model, inputs, [make_pruner("visionzip", keep=4), DART(keep=4, layer=LAYERS)], max_new_tokens=2)
    assert hooks() == hung and set(vars(tower)) == own
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)


@pytest.mark.parametrize(
    ("pruners", "options", "words"),
    [([], {}, "at least one condition"), ([None], {"max_new_tokens": 0}, "one new token"),
     ([None], {"memory": 0}, "above 0"), (["dart"], {}, "is no method")],
)  # fmt: skip
def test_bad_input_is_refused(pruners: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DartLabError, match=words):
        branch(model_of(), prompts(ONE), pruners, **options)


def test_a_text_only_prompt_is_refused() -> None:
    with pytest.raises(DartLabError, match="no visual tokens"):
        branch(model_of(), {"input_ids": torch.tensor([[1, 7, 8]])}, [DART(keep=4)])
    assert IMAGE not in (1, 7, 8)


def test_right_padding_is_refused() -> None:
    inputs = prompts(THREE)
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    with pytest.raises(DartLabError, match="left"):
        branch(model_of(), inputs, [DART(keep=4)])


def blocks_run(model: Any, inputs: Any, pruners: list[Pruner | None], **options: Any) -> int:
    """How often the first block of the tower ran."""
    runs: list[int] = []
    block = compat.vision_blocks(compat.vision_tower(model))[0]
    handle = block.register_forward_hook(lambda *_: runs.append(1))
    try:
        branch(model, inputs, pruners, max_new_tokens=2, **options)
    finally:
        handle.remove()
    return len(runs)


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_the_tower_runs_once_and_once_more_for_a_method_inside_it(images: tuple[int, ...]) -> None:
    model, inputs = model_of(), prompts(images)
    front = [
        make_pruner("visionzip", keep=4), make_pruner("divprune", keep=4), make_pruner("pooling", keep=4),
        make_pruner("vispruner", keep=4), FastV(keep=4, rerank=True),
    ]  # fmt: skip
    pruners = [None, DART(keep=4), *front]
    inside = [make_pruner("tome", keep=4, blocks=3), make_pruner("tome", keep=6, blocks=3)]
    assert blocks_run(model, inputs, pruners) == 1
    assert blocks_run(model, inputs, [*front[:2], *inside]) == 1 + len(inside)
    assert blocks_run(model, inputs, [*inside, *pruners]) == 1 + len(inside)
    assert blocks_run(model, inputs, front[:2]) == 1
    assert blocks_run(model, inputs, pruners, share=False) == len(pruners)
    found = branch(model, inputs, [*pruners, *inside], max_new_tokens=1)
    assert [one.encoded_once for one in found] == [True] * len(pruners) + [False] * len(inside)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("pruner", "words"),
    [(make_pruner("tome", keep=4, blocks=9), "vision block"), (CDPruner(keep=4), "has no text tower"),
     (make_pruner("divprune", keep=5, where="PROJECTED"), None)],
)  # fmt: skip
def test_refusals_are_the_same_with_one_run_of_the_tower(pruner: Pruner, words: str | None, share: bool) -> None:
    model, inputs = model_of(), prompts(ONE)
    pruners: list[Pruner | None] = [make_pruner("visionzip", keep=4), None, pruner]
    if words is None:  # a model of another family, which shrinks features behind its projector
        model, inputs = ONEVISION.model("sdpa"), ONEVISION.batch("one")
        pruners, words = [None, make_pruner("divprune", keep=5), pruner], "shrinks this picture or video"
    with pytest.raises(DartLabError, match=words):
        branch(model, inputs, pruners, max_new_tokens=1, share=share)
