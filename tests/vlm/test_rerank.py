"""FastV that ranks anew at every step: the losers of each step are masked, nothing is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from dart_lab.errors import DartLabError
from dart_lab.pruners import FastV
from dart_lab.vlm.insert import prune
from dart_lab.vlm.masking import mask_drop
from tests.vlm.common import ONE, THREE, batch, hidden_columns, small_llava
from tests.vlm.stepping import decode
from tests.vlm.test_generate import generate, prompts

LAST = 3  # behind the last layer nothing is cached that depends on the mask of an earlier step


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize(
    ("layer", "options"), [(2, {"cache_implementation": "static"}), (LAST, {"use_cache": False})],
    ids=["static", "uncached"],
)
def test_with_and_without_cache(images: tuple[int, ...], backend: str, layer: int, options: dict[str, Any]) -> None:
    model, pruner = small_llava(attention=backend), FastV(keep=0.25, rerank=True, layer=layer)
    with prune(model, pruner) as run:
        cached = generate(model, prompts(images), do_sample=False)
    with prune(model, pruner) as other:
        again = generate(model, prompts(images), do_sample=False, **options)
    assert torch.equal(again.sequences, cached.sequences)
    torch.testing.assert_close(torch.stack(again.logits), torch.stack(cached.logits), atol=1e-5, rtol=0)
    assert run.mode == other.mode == "mask" and len(run.samples) == len(other.samples) == len(images)
    for ours, theirs in zip(run.samples, other.samples, strict=True):
        assert [d.step for d in ours.decisions] == list(range(8))
        assert [d.kept.tolist() for d in ours.decisions] == [d.kept.tolist() for d in theirs.decisions]
    assert len({tuple(d.kept.tolist()) for d in run.samples[0].decisions}) > 1  # it does rank anew


def test_without_cache_each_step_drops_its_own_losers() -> None:
    model, inputs = small_llava(), prompts(ONE)
    with prune(model, FastV(keep=4, rerank=True)) as run:
        out = generate(model, inputs, do_sample=False, use_cache=False)
    for step, decision in enumerate(run.samples[0].decisions):
        now = out.sequences[:, : inputs["input_ids"].shape[1] + step]
        with prune(model, FastV(keep=4)) as alone, torch.no_grad():
            dropped = model(now, pixel_values=inputs["pixel_values"]).logits[:, -1]
        assert alone.kept[0].tolist() == decision.kept.tolist()
        torch.testing.assert_close(out.logits[step], dropped, atol=1e-5, rtol=0)


def test_first_step_equals_dropping() -> None:
    model, inputs = small_llava(), batch(THREE)
    with prune(model, FastV(keep=0.25, rerank=True)) as ranked, torch.no_grad():
        ours = model(**inputs).logits
    with prune(model, FastV(keep=0.25)) as run, torch.no_grad():
        dropped = model(**inputs).logits
    assert [k.tolist() for k in ranked.kept] == [k.tolist() for k in run.kept]
    hidden = hidden_columns(model, inputs, run)
    rows = ~hidden & inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[rows], dropped[rows], atol=1e-5, rtol=0)
    with mask_drop(model, hidden, layer=2), torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits[rows], ours[rows], atol=1e-6, rtol=0)


def test_beams_are_ranked_anew_too() -> None:
    model = small_llava()
    if transformers.__version__.startswith("5.17."):
        plain, without = (
            generate(model, prompts(), do_sample=False, num_beams=2, use_cache=cache) for cache in (True, False)
        )
        assert not torch.equal(plain.sequences, without.sequences)
        pytest.skip("this release of transformers mixes pictures up for beams without cache, unpruned too")
    with prune(model, FastV(keep=0.25, rerank=True, layer=LAST)) as run:
        cached = generate(model, prompts(), do_sample=False, num_beams=2)
    with prune(model, FastV(keep=0.25, rerank=True, layer=LAST)):
        uncached = generate(model, prompts(), do_sample=False, num_beams=2, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert len(run.samples) == len(THREE)


@pytest.mark.parametrize("query", ["mean", "last_visual", (0, -1)])
def test_queries_of_earlier_tokens_need_their_rows(query: object) -> None:
    model, inputs = small_llava(), batch(THREE)
    with prune(model, FastV(keep=0.25, rerank=True, query=query)), pytest.raises(DartLabError, match="use_cache"):
        decode(model, inputs, 1)
    with prune(model, FastV(keep=0.25, rerank=True, query=query)) as run:
        generate(model, prompts(), do_sample=False, use_cache=False)
    assert [d.step for d in run.samples[0].decisions] == list(range(8))
