"""`generate` in all its modes, and conversations on a pruned cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from dart_lab.pruners import DART, FastV, Random
from dart_lab.vlm.insert import prune
from dart_lab.vlm.masking import mask_drop
from tests.models import PATCH
from tests.vlm.common import (
    GRID,
    IMAGE,
    NEVER,
    ONE,
    THREE,
    TOKENS,
    Uneven,
    alone,
    batch,
    hidden_columns,
    small_llava,
    words,
)
from tests.vlm.stepping import cache_name, decode

KEEP_GOING: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "suppress_tokens": NEVER}


def prompts(images: tuple[int, ...] = THREE, **more: Any) -> dict[str, Tensor]:
    """Inputs as a user has them: `generate` numbers the positions."""
    inputs = batch(images, **more)
    del inputs["position_ids"]
    return inputs


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    with torch.no_grad():
        return model.generate(**inputs, **{**KEEP_GOING, **options}, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
def test_greedy_equals_masking(images: tuple[int, ...], options: dict[str, Any]) -> None:
    model, inputs = small_llava(), prompts(images)
    with prune(model, Uneven()) as run:
        ours = generate(model, inputs, do_sample=False, **options)
    assert len(run.samples) == len(images)  # also without a cache, where every step runs the prompt again
    assert all(len(sample.decisions) == 1 for sample in run.samples)
    with mask_drop(model, hidden_columns(model, inputs, run), layer=2):
        theirs = generate(model, inputs, do_sample=False, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_sampling_equals_masking() -> None:
    model, inputs = small_llava(), prompts()
    options = {"do_sample": True, "num_return_sequences": 2, "top_k": 0}
    torch.manual_seed(7)
    with prune(model, Uneven()) as run:
        ours = generate(model, inputs, **options)
    assert len(run.samples) == len(THREE)
    hidden = hidden_columns(model, inputs, run).repeat_interleave(2, dim=0)
    torch.manual_seed(7)
    with mask_drop(model, hidden, layer=2):
        theirs = generate(model, inputs, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert not torch.equal(ours.sequences[0], ours.sequences[1])


@pytest.mark.parametrize("pruner", [Random(keep=5), Uneven()], ids=lambda p: p.name)
def test_beam_scores_equal_teacher_forcing(pruner: Any) -> None:
    images = (1, 1, 1)  # releases before 5.20 shuffle the pictures of a prompt that has several
    model, inputs = small_llava(), prompts(images)
    with prune(model, pruner) as run:
        beams = generate(model, inputs, do_sample=False, num_beams=3, num_return_sequences=2, output_scores=True)
    assert len(run.samples) == len(images)
    hidden = hidden_columns(model, inputs, run)
    prompt = inputs["input_ids"].shape[1]
    for row, sequence in enumerate(beams.sequences):
        sample = row // 2
        real = torch.cat([inputs["attention_mask"][sample], torch.ones(8, dtype=torch.long)]).bool()
        with mask_drop(model, torch.nn.functional.pad(hidden[sample], (0, 8))[None, real], layer=2), torch.no_grad():
            picture = inputs["pixel_values"][sample : sample + 1]
            logits = model(input_ids=sequence[None, real], pixel_values=picture).logits[0]
        chosen = sequence[prompt:]
        total = logits[-9:-1].log_softmax(dim=-1).gather(1, chosen[:, None]).sum()
        assert beams.sequences_scores[row] == pytest.approx(float(total) / 8, abs=1e-5)


@pytest.mark.parametrize("answer", [0, 8, 12])  # the prompt's end is found in it, or is not
@pytest.mark.parametrize("assistant", ["prompt lookup", "model"])
@pytest.mark.parametrize("pruner", [DART(keep=5), FastV(keep=5)], ids=lambda p: p.name)
def test_assisted_decoding_equals_greedy(pruner: Any, assistant: str, answer: int) -> None:
    """Candidates neither run with the prompt, where the method would see them, nor stay when they are refused."""
    model, inputs = small_llava(), prompts(ONE, answer=answer)
    lookup, helper = {"prompt_lookup_num_tokens": 3}, {"assistant_model": small_llava(seed=3)}
    options = lookup if assistant == "prompt lookup" else helper
    length = {"min_new_tokens": None}  # which earlier releases refuse beside an assistant
    with prune(model, pruner) as plain:
        greedy = generate(model, inputs, do_sample=False, **length)
    with prune(model, pruner) as run:
        assisted = generate(model, inputs, do_sample=False, **length, **options)
    assert torch.equal(assisted.sequences, greedy.sequences)
    assert run.got == [5] and run.kept[0].tolist() == plain.kept[0].tolist()


def test_input_embeddings_with_a_mask() -> None:
    model, inputs = small_llava(), batch()
    seen: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with prune(model, DART(keep=5)) as by_ids:
        whole = decode(model, inputs, 0)
        expected = generate(model, prompts(ONE), do_sample=False).sequences[:, inputs["input_ids"].shape[1] :]
    hook.remove()
    with prune(model, DART(keep=5), visual=inputs["input_ids"] == IMAGE) as by_mask:
        out = generate(model, {"inputs_embeds": seen[0], "attention_mask": inputs["attention_mask"]}, do_sample=False)
    assert by_mask.kept[0].tolist() == by_ids.kept[0].tolist()
    assert by_mask.positions[0].tolist() == by_ids.positions[0].tolist()
    assert torch.equal(out.sequences[:, -8:], expected)
    torch.testing.assert_close(out.logits[0], whole.logits[0], atol=1e-5, rtol=0)


def turn(model: Any, inputs: dict[str, Tensor], cache: Any, tokens: list[list[int]], **more: Tensor) -> Any:
    """Feed several tokens a row on a cache; returns the output and the longer inputs."""
    new = torch.tensor(tokens)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(new)], dim=1)
    ids = torch.cat([inputs["input_ids"], new], dim=1)
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(
            input_ids=new, attention_mask=mask, position_ids=position[:, -new.shape[1] :], use_cache=True,
            **{cache_name(model): cache}, **more,
        )
    return out, {**inputs, "input_ids": ids, "attention_mask": mask, "position_ids": position}


def test_second_turn_of_text_equals_recompute() -> None:
    model, inputs = small_llava(), batch(THREE)
    generator = torch.Generator().manual_seed(5)
    with prune(model, Uneven()) as run:
        first = decode(model, inputs, 3)
        answered = {**inputs, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)}
        answered["input_ids"] = torch.cat([inputs["input_ids"], first.tokens], dim=1)
        out, whole = turn(model, answered, first.cache, [words(generator, 4) for _ in THREE])
    hidden = torch.nn.functional.pad(hidden_columns(model, inputs, run), (0, 7))
    with mask_drop(model, hidden, layer=2), torch.no_grad():
        want = model(**whole, use_cache=False).logits[:, -4:]
    torch.testing.assert_close(out.logits, want, atol=1e-5, rtol=0)
    assert len(run.samples) == len(THREE)


def test_second_turn_with_a_new_picture_equals_recompute() -> None:
    model, inputs = small_llava(), batch((1, 1))
    generator = torch.Generator().manual_seed(6)
    pictures = torch.randn(2, 3, GRID * PATCH, GRID * PATCH, generator=generator)
    text = [[*words(generator, 1), *[IMAGE] * TOKENS, *words(generator, 4)] for _ in range(2)]
    with prune(model, Uneven()) as run:
        first = decode(model, inputs, 0)
        out, whole = turn(model, inputs, first.cache, text, pixel_values=pictures)
    assert len(run.samples) == 4  # two prompts, two pictures each in a turn of its own
    before = inputs["input_ids"].shape[1]
    hidden = whole["input_ids"] == IMAGE
    for row in range(2):
        hidden[row, torch.from_numpy(run.positions[row])] = False
        hidden[row, before + torch.from_numpy(run.positions[2 + row])] = False
    assert 0 < int(hidden[:, before:].sum()) < 2 * TOKENS
    both = torch.stack([inputs["pixel_values"][0], pictures[0], inputs["pixel_values"][1], pictures[1]])
    with mask_drop(model, hidden, layer=2), torch.no_grad():
        want = model(**{**whole, "pixel_values": both}, use_cache=False).logits[:, before:]
    rows = ~hidden[:, before:]
    torch.testing.assert_close(out.logits[rows], want[rows], atol=1e-5, rtol=0)


def test_a_copied_cache_goes_on_by_itself() -> None:
    model, inputs = small_llava(), batch(THREE)
    generator = torch.Generator().manual_seed(8)
    with prune(model, Uneven()):
        first = decode(model, inputs, 0)
        kept = copy.deepcopy(first.cache)
        here, there = ([words(generator, 3) for _ in THREE] for _ in range(2))
        one = turn(model, inputs, first.cache, here)[0].logits
        turn(model, inputs, copy.deepcopy(kept), there)
        again = turn(model, inputs, kept, here)[0].logits
    assert torch.equal(one, again)


def test_no_cache_decides_once_and_a_longer_prompt_is_new() -> None:
    model = small_llava()
    short, other = batch(), batch(seed=1)
    with prune(model, FastV(keep=5)) as run, torch.no_grad():
        model(**short, use_cache=False)
        model(**other, use_cache=False)
    assert len(run.samples) == 2


def test_a_plain_pass_after_beams_counts_its_own_rows() -> None:
    model, inputs = small_llava(), prompts()
    with prune(model, Random(keep=5)) as run, torch.no_grad():
        generate(model, inputs, do_sample=False, num_beams=3)
        model(**inputs)
    assert len(run.samples) == 2 * len(THREE)
    for beam, plain in zip(run.kept[: len(THREE)], run.kept[len(THREE) :], strict=True):
        assert beam.tolist() == plain.tolist()


def test_random_depends_on_sample_and_seed_alone() -> None:
    model, inputs = small_llava(), batch(THREE)

    def kept(given: dict[str, Tensor], seed: int = 0) -> list[list[int]]:
        with prune(model, Random(keep=5, seed=seed)) as run, torch.no_grad():
            model(**given)
        return [one.tolist() for one in run.kept]

    together = kept(inputs)
    assert [kept(alone(inputs, THREE, row))[0] for row in range(len(THREE))] == together
    order = [2, 0, 1]
    turned = {name: inputs[name][order] for name in ("input_ids", "attention_mask", "position_ids")}
    turned["pixel_values"] = inputs["pixel_values"][[3, 0, 1, 2]]  # pictures 0 | 1 2 | 3
    assert kept(turned) == [together[row] for row in order]
    assert kept(inputs) == together
    assert all(a != b for a, b in zip(kept(inputs, seed=1), together, strict=True))
    other_picture = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
    assert all(a != b for a, b in zip(kept(other_picture), together, strict=True))


def test_random_does_not_depend_on_padding_of_embeddings() -> None:
    model, inputs = small_llava(), batch(THREE)
    seen: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    visual = inputs["input_ids"] == IMAGE
    with prune(model, Random(keep=5), visual=visual) as together, torch.no_grad():
        model(inputs_embeds=seen[0], attention_mask=inputs["attention_mask"], position_ids=inputs["position_ids"])
    for row in range(len(THREE)):
        real = inputs["attention_mask"][row].bool()
        with prune(model, Random(keep=5), visual=visual[row : row + 1, real]) as run, torch.no_grad():
            model(inputs_embeds=seen[0][row : row + 1, real])
        assert run.kept[0].tolist() == together.kept[row].tolist()
