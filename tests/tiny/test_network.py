"""The training network against transformers' own LLaVA, against dropping, and against one question at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dart_lab.tasks import load_task
from dart_lab.tiny import data, words
from dart_lab.tiny.evaluate import by_picture, pack_samples
from dart_lab.tiny.export import write_folder
from dart_lab.tiny.network import Rows, Text, TinyNetwork
from dart_lab.tiny.vision import Shape

SMALL = Shape(width=32, heads=2, vision_layers=3, vision_ff=48, layers=4, ff=40)
ORIGIN = torch.zeros(1, 2, dtype=torch.int64)


@pytest.fixture(scope="module")
def network() -> TinyNetwork:
    torch.manual_seed(0)
    made = TinyNetwork(SMALL, len(words.VOCABULARY), [words.IDS[word] for word in words.PREFIX])
    for parameter in made.parameters():  # every bias and every norm counts
        parameter.data.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.half().float())
    return made.eval()


def line(question: str) -> Text:
    ids = torch.tensor([words.encode(question) + [words.IDS[word] for word in words.SUFFIX]])
    return Text(ids, torch.zeros_like(ids), torch.arange(ids.shape[1])[None])


@torch.no_grad()
def test_logits_equal_those_of_transformers(network: TinyNetwork, tmp_path: Path) -> None:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    write_folder(network, tmp_path)
    stock, loading = LlavaForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    processor = AutoProcessor.from_pretrained(tmp_path)
    sample = load_task("shapes", n=1, seed=8)[0]
    questions = ["Is there an orange circle?", "what number is on the plate?"]
    prompts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
            add_generation_prompt=True,
        )
        for question in questions
    ]
    inputs = processor(text=prompts, images=[sample.image] * 2, padding=True, return_tensors="pt")
    pixels = data.normalise([np.asarray(sample.image)])
    assert torch.allclose(inputs["pixel_values"][:1], pixels, atol=1e-6)
    expected = stock(**inputs).logits
    features, _ = network.look(pixels, ORIGIN)
    for row, question in enumerate(questions):
        text = line(question)
        length = text.ids.shape[1]
        assert inputs["input_ids"][row, -length:].tolist() == text.ids[0].tolist()
        found = network.answer(features, ORIGIN, text).logits[0]
        assert (found - expected[row, -length:]).abs().max() < 1e-4


@torch.no_grad()
def test_packed_questions_do_not_see_each_other(network: TinyNetwork) -> None:
    groups = by_picture(list(load_task("shapes", n=7, seed=1, questions_per_image=7)))
    text, _, spans = pack_samples(groups)
    features, _ = network.look(data.normalise([np.asarray(groups[0][0].image)]), ORIGIN)
    packed = network.answer(features, ORIGIN, text).logits[0]
    for sample, (_, end, _) in zip(groups[0], spans[0], strict=True):
        alone = network.answer(features, ORIGIN, line(sample.question)).logits[0, -1]
        assert torch.allclose(packed[end], alone, atol=1e-4)


@torch.no_grad()
def test_a_window_is_that_part_of_the_canvas(network: TinyNetwork) -> None:
    """Without attention to the rest, the patches of a window get the places they have on the whole canvas."""
    origin = torch.tensor([[5, 9]])
    places = network.places(origin, 4)[0]
    assert places.tolist() == [(9 + row) * 24 + 5 + column for row in range(4) for column in range(4)]


@torch.no_grad()
def test_keep_equals_leaving_the_tokens_out(network: TinyNetwork) -> None:
    """With every layer late, unkept tokens are out of the language model: changing them changes nothing."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, 576, SMALL.width, generator=generator)
    keep = torch.rand(1, 576, generator=generator) < 0.3
    other = torch.where(keep[..., None], features, torch.randn(features.shape, generator=generator))
    text = line("is there a red circle?")
    first, second = (network.answer(f, ORIGIN, text, late_from=0, keep=keep).logits for f in (features, other))
    assert torch.equal(first, second)
    free = network.answer(other, ORIGIN, text).logits
    assert not torch.allclose(first, free, atol=1e-3)
    everything = torch.ones_like(keep)
    assert torch.allclose(network.answer(other, ORIGIN, text, keep=everything).logits, free, atol=1e-5)


@torch.no_grad()
def test_blocked_text_reads_nothing_early(network: TinyNetwork) -> None:
    """Blocked in all early layers and with nothing kept after them, the answer does not depend on the picture."""
    text, blocked = line("is there a red circle?"), torch.tensor([True])
    nothing = torch.zeros(1, 576, dtype=torch.bool)
    logits = [
        network.answer(torch.randn(1, 576, SMALL.width), ORIGIN, text, blocked=blocked, keep=nothing).logits
        for _ in range(2)
    ]
    assert torch.equal(*logits)


@torch.no_grad()
def test_attention_rows_are_distributions_over_what_is_seen(network: TinyNetwork) -> None:
    features, text = torch.randn(1, 576, SMALL.width), line("how many objects are red?")
    noun = text.ids.shape[1] - 4
    rows = network.answer(features, ORIGIN, text, rows=Rows(2, 1, torch.tensor([0]), torch.tensor([noun]))).rows
    assert rows is not None
    assert torch.allclose(rows.exp().sum(dim=1), torch.ones(1), atol=1e-5)
    assert torch.isneginf(rows[0, 3 + 576 + noun + 1 :]).all()
    assert torch.isfinite(rows[0, : 3 + 576 + noun + 1]).all()
