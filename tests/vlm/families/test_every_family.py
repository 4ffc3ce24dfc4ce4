"""Every family: dropping equals masking in `generate`, keeping all changes nothing, a row does not see its batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.pruners import DART, FastV, KeepAll, Pruner, Random, pruner_names
from dart_lab.pruners.fitting import BUDGETLESS, Depth, fit
from dart_lab.vlm import compat
from dart_lab.vlm.insert import prune
from dart_lab.vlm.locate import layout
from dart_lab.vlm.masking import mask_drop
from tests.vlm.families.zoo import FAMILIES, VIDEOS, Zoo
from tests.vlm.kernels import FLASH, emulated_flash, uncompiled_flex

STEPS = 8
LAYER = 2
METHODS = [DART(keep=5), FastV(keep=5), Random(keep=5)]


def answer(
    kind: Zoo, model: Any, inputs: dict[str, Tensor], steps: int = STEPS, **options: Any
) -> tuple[Tensor, Tensor]:
    """Tokens and the logits of each step."""
    out = model.generate(
        **inputs, max_new_tokens=steps, do_sample=False, output_logits=True, return_dict_in_generate=True,
        suppress_tokens=[2, *kind.visual], **options,
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("pruner", METHODS, ids=lambda p: p.name)
@pytest.mark.parametrize("prompts", ["one", "padded"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_dropping_equals_masking(kind: Zoo, backend: str, prompts: str, pruner: Pruner) -> None:
    model, inputs = kind.model(backend), kind.batch(prompts)
    with prune(model, pruner) as run:
        tokens, logits = answer(kind, model, inputs)
    hidden = torch.isin(inputs["input_ids"], torch.tensor(kind.visual))
    for row, positions in enumerate(run.positions):
        assert len(positions) == 5
        hidden[row, torch.from_numpy(positions)] = False
    with mask_drop(model, hidden, layer=pruner.stage.layer):
        masked_tokens, masked_logits = answer(kind, model, inputs)
    assert torch.equal(tokens, masked_tokens)
    torch.testing.assert_close(logits, masked_logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["flash", "flex"])
@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_other_kernels_drop_as_sdpa(kind: Zoo, backend: str) -> None:
    """FlashAttention, emulated, and FlexAttention, not compiled, in the decoder; the tower keeps SDPA."""
    plain, model, inputs = kind.model("sdpa"), kind.build("sdpa"), kind.batch("padded")
    config = compat.text_model(model).config
    config._attn_implementation_internal = FLASH if backend == "flash" else "flex_attention"
    with emulated_flash(), uncompiled_flex(), prune(model, DART(keep=5)) as run:
        tokens, logits = answer(kind, model, inputs, steps=3)
    with prune(plain, DART(keep=5)) as expected:
        expected_tokens, expected_logits = answer(kind, plain, inputs, steps=3)
    assert [kept.tolist() for kept in run.kept] == [kept.tolist() for kept in expected.kept]
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logits, expected_logits, atol=3e-5, rtol=0)  # two kernels round otherwise


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_keeping_all_is_bit_identical(kind: Zoo, backend: str) -> None:
    model, inputs = kind.model(backend), kind.batch("padded")
    tokens, logits = answer(kind, model, inputs)
    with prune(model, KeepAll()):
        kept_tokens, kept_logits = answer(kind, model, inputs)
    assert torch.equal(tokens, kept_tokens) and torch.equal(logits, kept_logits)


@pytest.mark.parametrize("pruner", METHODS, ids=lambda p: p.name)
@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_a_row_of_a_batch_answers_as_alone(kind: Zoo, pruner: Pruner) -> None:
    model = kind.model("sdpa")
    with prune(model, pruner) as together:
        tokens, logits = answer(kind, model, kind.batch("padded"))
    for row in range(len(tokens)):
        with prune(model, pruner) as alone:
            own_tokens, own_logits = answer(kind, model, kind.row("padded", row))
        assert together.kept[row].tolist() == alone.kept[0].tolist()
        assert torch.equal(tokens[row, -STEPS:], own_tokens[0, -STEPS:])
        torch.testing.assert_close(logits[:, row], own_logits[:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_greedy_decoding_equals_a_recompute_without_cache(kind: Zoo) -> None:
    model, inputs = kind.model("sdpa"), kind.batch("padded")
    if str(kind) == "idefics3" and transformers.__version__.startswith("5.0."):
        (plain, _), (without, _) = answer(kind, model, inputs), answer(kind, model, inputs, use_cache=False)
        assert not torch.equal(plain, without)
        pytest.skip("this release of transformers answers otherwise without cache about pictures, unpruned too")
    with prune(model, DART(keep=5)):
        tokens, logits = answer(kind, model, inputs)
    with prune(model, DART(keep=5)):
        again, recomputed = answer(kind, model, inputs, use_cache=False)
    assert torch.equal(tokens, again)
    torch.testing.assert_close(logits, recomputed, atol=2e-5, rtol=0)  # other matrix shapes round otherwise


@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_beam_scores_equal_teacher_forcing(kind: Zoo) -> None:
    """The score of the best beam is the mean log-probability of its tokens, computed again in one pruned pass."""
    if str(kind) == "qwen3_vl video" and transformers.__version__.startswith("4."):
        pytest.skip("this release of transformers cannot repeat a timed video for beams")
    model, inputs = kind.model("sdpa"), kind.batch("one")
    if str(kind) == "internvl" and transformers.__version__.startswith(("4.", "5.0.", "5.17.")):
        score, again = best_beam(kind, model, inputs, None)
        assert not torch.allclose(score, again, atol=1e-5, rtol=0)
        pytest.skip("this release of transformers mixes a picture's tiles up for beams, unpruned too")
    score, again = best_beam(kind, model, inputs, FastV(keep=5, layer=LAYER))
    torch.testing.assert_close(score, again, atol=1e-5, rtol=0)


def best_beam(kind: Zoo, model: Any, inputs: dict[str, Tensor], pruner: Pruner | None) -> tuple[Tensor, Tensor]:
    """The score `(1,)` of the best beam, and the same computed again; without a method, of the model as it is."""
    with nullcontext() if pruner is None else prune(model, pruner) as run:
        out = model.generate(
            **inputs, max_new_tokens=3, num_beams=2, do_sample=False, output_scores=True,
            return_dict_in_generate=True, suppress_tokens=[2, *kind.visual], length_penalty=1.0,
        )  # fmt: skip
    length = inputs["input_ids"].shape[1]
    new = out.sequences[:, length:]
    longer = kind.extended(inputs, new[:, :-1])
    hidden = torch.zeros_like(longer["input_ids"], dtype=torch.bool)
    if run is not None:
        assert len(run.kept[0]) == 5
        hidden = torch.isin(longer["input_ids"], torch.tensor(kind.visual))
        hidden[0, torch.from_numpy(run.positions[0])] = False
    with torch.no_grad(), mask_drop(model, hidden, layer=LAYER):
        logits = model(**longer).logits[:, length - 1 :].float()
    chosen = logits.log_softmax(dim=-1).gather(2, new[:, :, None])[..., 0]
    return out.sequences_scores, chosen.mean(dim=1)


@pytest.mark.parametrize("kind", [*FAMILIES, *VIDEOS], ids=str)
def test_random_draws_by_the_pictures_too(kind: Zoo) -> None:
    """The same words about other pictures are another sample, and so another draw."""
    model, inputs = kind.model("sdpa"), kind.batch("one")
    kept = []
    for shift in (0.0, 1.0, 0.0):
        with prune(model, Random(keep=5)) as run, torch.no_grad():
            model(**{**inputs, kind.pixels: inputs[kind.pixels] + shift})
        kept.append(run.kept[0].tolist())
    assert kept[0] == kept[2] != kept[1]


@pytest.mark.parametrize("name", [name for name in pruner_names() if name not in BUDGETLESS])
@pytest.mark.parametrize("kind", FAMILIES, ids=str)
def test_every_method_runs_or_says_in_a_line_why_not(
    kind: Zoo, name: str, record_property: Callable[[str, object], None]
) -> None:
    model, inputs = kind.model("sdpa"), kind.batch("padded")
    sizes = [len(sample) for sample in layout(model, inputs).samples]
    try:
        pruner = fit(name, keep=5, depth=Depth(layers=4, blocks=1, visual=max(sizes)), layer=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DartLabWarning)
            with torch.no_grad(), prune(model, pruner) as run:
                model(**inputs)
    except DartLabError as error:
        assert "\n" not in str(error)
        record_property("refused", str(error))
        return
    for kept, got, size in zip(run.kept, run.got, sizes, strict=True):
        assert len(np.unique(kept)) == len(kept) and kept.min() >= 0 and kept.max() < size
        assert 0 < len(kept) <= got <= size, "a class token takes a patch's place and is counted"
