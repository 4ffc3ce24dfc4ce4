"""MiniCPM-V 2.6 on a stand-in of the same structure: whose each query is, dropping equals masking, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import dart_lab as dl
from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, DivPrune, FasterVLM, FastV, KeepAll, Pruner, Random
from dart_lab.vlm import compat
from dart_lab.vlm.families.minicpm import marked_ids
from dart_lab.vlm.insert import prune
from dart_lab.vlm.locate import layout
from dart_lab.vlm.masking import mask_drop
from dart_lab.vlm.select import select
from tests.vlm.families.minicpm_models import (
    IMAGE,
    QUERIES,
    SLICE,
    TOKENIZER,
    as_data,
    minicpm_batch,
    minicpm_model,
    row_of,
)

PROMPTS = [[(2, 3)], [(0, 0), (1, 2)], []]
CROPS = [[7], [1, 3], []]
STEPS = 6
KIND = "minicpm-v (stand-in)"  # its name on docs/families.md
METHODS = [DART(keep=5), FastV(keep=5), Random(keep=5)]


def answer(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """New tokens and the logits of each step."""
    out = model.generate(
        **inputs, tokenizer=TOKENIZER, max_new_tokens=STEPS, do_sample=False, output_logits=True,
        return_dict_in_generate=True, suppress_tokens=[2], **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def hidden_but(inputs: dict[str, Any], positions: list[np.ndarray]) -> Tensor:
    """Marks the visual tokens that are not at these positions."""
    hidden = marked_ids(inputs) == -1
    for row, own in zip(hidden, positions, strict=True):
        row[torch.from_numpy(own)] = False
    return hidden


def test_every_query_has_its_picture_and_crop_and_no_place() -> None:
    inputs = minicpm_batch(PROMPTS)
    found = layout(minicpm_model(layers=1), inputs)
    for row, tokens in enumerate(found.samples):
        bounds = [range(int(start), int(end)) for start, end in inputs["image_bound"][row]]
        assert tokens.position.tolist() == [place for bound in bounds for place in bound]
        each = [(image, crop) for image, crops in enumerate(CROPS[row]) for crop in range(crops)]
        assert list(zip(tokens.image, tokens.crop, strict=True)) == [one for one in each for _ in range(QUERIES)]
        assert (tokens.row == -1).all() and (tokens.column == -1).all() and np.isnan(tokens.box).all()
        assert set(tokens.kind) <= {"query"}
    assert ((found.group == 0) == ~inputs["attention_mask"].numpy()).all()


@pytest.mark.parametrize("pruner", METHODS, ids=lambda p: p.name)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_dropping_equals_masking(backend: str, pruner: Pruner) -> None:
    model, inputs = minicpm_model(attention=backend), minicpm_batch(PROMPTS[:2])
    with prune(model, pruner) as run:
        tokens, logits = answer(model, inputs)
    assert [len(kept) for kept in run.kept] == [5, 5]
    with mask_drop(model, hidden_but(inputs, run.positions), layer=pruner.stage.layer):
        masked, masked_logits = answer(model, inputs)
    assert torch.equal(tokens, masked)
    torch.testing.assert_close(logits, masked_logits, atol=1e-5, rtol=0)
    with prune(model, pruner) as forward, torch.no_grad():
        step = model(**as_data(inputs)).logits[:, -1]
    assert [kept.tolist() for kept in forward.kept] == [kept.tolist() for kept in run.kept]
    torch.testing.assert_close(step, logits[0], atol=1e-5, rtol=0)


def test_keeping_all_is_bit_identical_and_nothing_is_left_on_the_model() -> None:
    model, inputs = minicpm_model(), minicpm_batch(PROMPTS)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    tokens, logits = answer(model, inputs)
    with prune(model, KeepAll()):
        kept, kept_logits = answer(model, inputs)
    assert torch.equal(tokens, kept) and torch.equal(logits, kept_logits)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("pruner", [*METHODS, DivPrune(keep=6), DivPrune(keep=2, where="PROJECTED")], ids=str)
def test_a_row_of_a_batch_answers_as_alone(pruner: Pruner) -> None:
    model, inputs = minicpm_model(vision_batch=3), minicpm_batch(PROMPTS)
    with prune(model, pruner) as together:
        tokens, logits = answer(model, inputs)
    for row in range(2):
        with prune(model, pruner) as alone:
            own, own_logits = answer(model, row_of(inputs, row))
        assert together.kept[row].tolist() == alone.kept[0].tolist()
        assert torch.equal(tokens[row], own[0])
        torch.testing.assert_close(logits[:, row], own_logits[:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pruner", [DivPrune(keep=6), DivPrune(keep=2, where="PROJECTED")], ids=lambda p: p.stage.kind)
def test_dropping_in_front_equals_feeding_the_short_prompt(pruner: Any) -> None:
    model, inputs = minicpm_model(), minicpm_batch(PROMPTS[:2])
    with torch.no_grad():
        full, _ = model.get_vllm_embedding(inputs)
    with prune(model, pruner) as run:
        _, logits = answer(model, inputs)
    for row, crops in enumerate(CROPS[:2]):
        assert len(run.kept[row]) == (pruner.keep if pruner.stage.kind == "LLM_IN" else sum(crops) * pruner.keep)
        stays = ~hidden_but(inputs, run.positions)[row] & inputs["attention_mask"][row]
        short = full[row : row + 1, stays]
        out = model.llm.generate(
            inputs_embeds=short, attention_mask=torch.ones(short.shape[:2]), max_new_tokens=STEPS, do_sample=False,
            output_logits=True, return_dict_in_generate=True, suppress_tokens=[2], pad_token_id=0,
        )  # fmt: skip
        torch.testing.assert_close(logits[:, row], torch.stack(out.logits)[:, 0], atol=1e-5, rtol=0)


def test_beams_share_the_choice_of_their_prompt() -> None:
    model, inputs = minicpm_model(), minicpm_batch(PROMPTS[:2])
    with prune(model, FastV(keep=5)) as run:
        tokens, _ = answer(model, inputs, num_beams=2)
    assert len(run.kept) == 2
    with mask_drop(model, hidden_but(inputs, run.positions).repeat_interleave(2, dim=0), layer=FastV(keep=5).layer):
        masked, _ = answer(model, inputs, num_beams=2)
    assert torch.equal(tokens, masked)


def test_random_draws_by_the_pictures_too() -> None:
    model, inputs = minicpm_model(vision_batch=2), minicpm_batch(PROMPTS[:1])
    kept = []
    for shift in (0.0, 1.0, 0.0):
        moved = [[view + shift for view in own] for own in inputs["pixel_values"]]
        with prune(model, Random(keep=5)) as run:
            answer(model, {**inputs, "pixel_values": moved})
        kept.append(run.kept[0].tolist())
    assert kept[0] == kept[2] != kept[1]


def test_the_table_and_select_say_the_same() -> None:
    model, inputs = minicpm_model(), minicpm_batch(PROMPTS[:2])
    (chosen,) = select(model, as_data(inputs), [DART(keep=5)])
    with prune(model, DART(keep=5)) as run:
        answer(model, inputs)
    assert run.table().equals(chosen.table())
    assert set(run.table().kind) == {"query"} and run.table().query("sample == 0").crop.max() == CROPS[0][0] - 1
    assert all(sample.view is None for sample in run.samples)


def test_what_cannot_be_right_is_refused() -> None:
    model, inputs = minicpm_model(layers=2), minicpm_batch(PROMPTS[:1])
    bound = inputs["image_bound"][0]
    with pytest.raises(DartLabError, match="has 3 tokens instead of 4"):
        layout(model, {**inputs, "image_bound": [bound - torch.tensor([0, 1])]})
    with pytest.raises(DartLabError, match="begins inside a picture"):
        layout(model, {**inputs, "image_bound": [torch.tensor([[0, QUERIES]])]})
    slices_as_pictures = torch.where(inputs["input_ids"] == SLICE, IMAGE, inputs["input_ids"])
    with pytest.raises(DartLabError, match=r"as MiniCPM-V 2\.5 writes the slices"):
        layout(model, {**inputs, "input_ids": slices_as_pictures})
    with pytest.raises(DartLabError, match="2 entries for 1 prompts"):
        layout(model, {**inputs, "image_bound": [bound, bound]})
    with pytest.raises(DartLabError, match="where='PROJECTED'"), prune(model, FasterVLM(keep=2)):
        pass
    with pytest.raises(DartLabError, match="prefill_chunk_size"), prune(model, DART(keep=2, layer=1)):
        answer(model, inputs, prefill_chunk_size=4)


@pytest.mark.skipif(not hasattr(transformers, "MiniCPMV4_6Config"), reason="releases before 5.24 lack the class")
def test_native_classes_are_refused_for_their_linear_attention(tmp_path: Path) -> None:
    text = {
        "model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 60,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MiniCPMV4_6Config(text_config=text, vision_config=vision, insert_layer_id=0)
    reason = r"'minicpmv4_6' is refused: .* linear attention"
    model = transformers.MiniCPMV4_6ForConditionalGeneration(config)
    with pytest.raises(DartLabError, match=reason), prune(model, DART(keep=2)):
        pass
    visual = torch.zeros(1, 6, dtype=torch.bool)
    with (
        pytest.raises(DartLabError, match="layers from 1 on have linear_attention"),
        prune(model, DART(keep=2, layer=1), visual=visual),
    ):
        pass
    model.save_pretrained(tmp_path)
    with pytest.raises(DartLabError, match=reason):
        dl.load(tmp_path)


def test_parts_are_found_by_the_names_of_the_public_checkpoint() -> None:
    model = minicpm_model(layers=1)
    assert compat.text_model(model) is model.llm.model and compat.vision_tower(model) is model.vpm
    assert compat.projector(model) is model.resampler
    assert compat.vision_blocks(model.vpm) is model.vpm.encoder.layers
