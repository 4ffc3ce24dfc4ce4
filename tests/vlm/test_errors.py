"""What cannot be pruned rightly is refused in one line, and the model is as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.probes.attention_mass import AttentionMass
from dart_lab.pruners import DART, FastV, Random, Reduction, Signals, UniformGrid
from dart_lab.vlm.insert import prune
from dart_lab.vlm.locate import layout
from dart_lab.vlm.select import select
from tests.vlm.common import IMAGE, ONE, THREE, batch, pad, small_llava
from tests.vlm.test_generate import generate, prompts
from tests.vlm.test_restore import assert_as_before, snapshot, weights


class Rubbish(UniformGrid):
    """Returns whatever it is told to."""

    answer: Callable[[Signals], Any]

    def reduce(self, signals: Signals, asked: torch.Tensor) -> Any:
        return type(self).answer(signals)


def rubbish(answer: Callable[[Signals], Any]) -> Rubbish:
    return type("Rubbish", (Rubbish,), {"answer": staticmethod(answer), "name": "rubbish"})(keep=2)


def reduction(signals: Signals, keep: list[float], rows: int = 1, size: int = 16) -> Reduction:
    return Reduction(
        keep=torch.tensor([keep]).repeat(rows, 1), size=torch.full_like(signals.counts, size),
        asked=torch.full_like(signals.counts, 2),
    )


def right_padded() -> dict[str, torch.Tensor]:
    inputs = prompts((1, 1))
    count = int((inputs["attention_mask"][0] == 0).sum())
    assert count
    for name in ("input_ids", "attention_mask"):
        inputs[name][0] = inputs[name][0].roll(-count)
    return inputs


def cut_prompt() -> dict[str, torch.Tensor]:
    inputs = batch()
    end = int((inputs["input_ids"][0] == IMAGE).nonzero().max())
    return {name: value if name == "pixel_values" else value[:, :end] for name, value in inputs.items()}


def forward(model: Any, pruner: Any, inputs: Any = None, **more: Any) -> None:
    with prune(model, pruner, **more), torch.no_grad():
        model(**(batch() if inputs is None else inputs))


def generation(model: Any, inputs: Any = None, **options: Any) -> None:
    with prune(model, DART(keep=5)):
        generate(model, prompts(THREE) if inputs is None else inputs, **options)


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "layer 0": (lambda m: forward(m, DART(keep=5, layer=0)), "K ≥ 1"),
    "layer beyond the last": (lambda m: forward(m, DART(keep=5, layer=4)), "give 1 to 3"),
    "reranking beyond the last": (lambda m: forward(m, FastV(keep=5, layer=9, rerank=True)), "4 decoder layers"),
    "not a method": (lambda m: forward(m, "dart"), "'dart' is no method"),
    "a class": (lambda m: forward(m, DART), "give one with its parameters"),
    "not a method to select": (lambda m: select(m, batch(), ["dart"]), "'dart' is no method"),
    "nothing to select with": (lambda m: select(m, batch(), []), "at least one"),
    "nothing to select from": (lambda m: select(m, pad([[1, 9, 9]], []), [DART(keep=5)]), "no visual tokens"),
    "keep more than there are": (lambda m: forward(m, Random(keep=17)), "only 16 visual tokens"),
    "prompt cut inside the image": (lambda m: forward(m, DART(keep=5), cut_prompt()), "cuts an image"),
    "layout of a cut prompt": (lambda m: layout(m, cut_prompt()), "cuts an image"),
    "prompt in chunks": (lambda m: generation(m, prefill_chunk_size=4), "prefill_chunk_size=4"),
    "padding on the right": (lambda m: generation(m, right_padded()), "padding_side='left'"),
    "mask of another shape": (
        lambda m: forward(m, DART(keep=5), visual=torch.ones(1, 99, dtype=torch.bool)), r"visual has shape \(1, 99\)"
    ),
    "not a reduction": (lambda m: forward(m, rubbish(lambda s: s.visual)), "return a Reduction"),
    "nothing": (lambda m: forward(m, rubbish(lambda s: None)), "return a Reduction"),
    "floats": (lambda m: forward(m, rubbish(lambda s: reduction(s, [0.5, 1.5]))), "int64"),
    "another batch": (lambda m: forward(m, rubbish(lambda s: reduction(s, [0, 1], rows=5))), "batch 1"),
    "unsorted": (lambda m: forward(m, rubbish(lambda s: reduction(s, [3, 1]))), "unsorted"),
    "twice the same": (lambda m: forward(m, rubbish(lambda s: reduction(s, [3, 3]))), "duplicate"),
    "beyond the image": (lambda m: forward(m, rubbish(lambda s: reduction(s, [3, 16]))), "out of span"),
    "another number": (lambda m: forward(m, rubbish(lambda s: reduction(s, [3]))), "wrong count"),
    "text included": (lambda m: forward(m, rubbish(lambda s: reduction(s, [0, 1], size=19))), "visual tokens only"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refused_in_one_line_and_restored(name: str) -> None:
    model = small_llava()
    generate(model, prompts(), do_sample=False)
    before, tensors = snapshot(model), weights(model)
    act, message = FAULTS[name]
    with warnings.catch_warnings(), pytest.raises(DartLabError, match=message) as caught:
        warnings.simplefilter("ignore", DartLabWarning)
        act(model)
    assert "\n" not in str(caught.value)
    assert_as_before(model, before, tensors)


def test_a_prompt_without_a_picture_warns_and_is_left_alone() -> None:
    model, inputs = small_llava(), pad([[1, 9, 10, 11], [1, 12]], [])
    with torch.no_grad():
        plain = model(**inputs).logits
        with pytest.warns(DartLabWarning, match="nothing was pruned"), prune(model, DART(keep=5)) as run:
            assert torch.equal(model(**inputs).logits, plain)
    assert not run.samples
    with pytest.raises(DartLabError, match="nothing was recorded"):
        run.table()


def test_a_prompt_without_a_picture_beside_one_with_it() -> None:
    model, inputs = small_llava(), batch((1, 0))
    with torch.no_grad():
        plain = model(**inputs).logits
        with prune(model, DART(keep=0.25)) as run:
            pruned = model(**inputs).logits
    assert run.got == [4, 0]
    real = inputs["attention_mask"][1].bool()
    torch.testing.assert_close(pruned[1, real], plain[1, real], atol=1e-5, rtol=0)


SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
}


def test_a_sliding_window_is_refused() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8)).eval()
    visual = torch.zeros(1, 20, dtype=torch.bool)
    with pytest.raises(DartLabError, match="window"), prune(model, DART(keep=5), visual=visual):
        pass
    whole = MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None)).eval()
    visual[:, 3:13] = True
    with prune(whole, DART(keep=5), visual=visual) as run, torch.no_grad():
        whole(torch.arange(20)[None])
    assert run.got == [5]


@pytest.mark.parametrize(
    ("model", "known"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4)), "gpt2"),
        (lambda: BertModel(BertConfig(**SIZES)), "bert"),
        (lambda: torch.nn.Linear(2, 2), "Linear"),
    ],
    ids=["gpt2", "bert", "linear"],
)
def test_unknown_models_are_refused(model: Callable[[], Any], known: str) -> None:
    made = model()
    refusal = f"'{known}' is not supported.*llava.*visual=mask"
    with pytest.raises(DartLabError, match=refusal), prune(made, DART(keep=5)):
        pass
    mask = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(DartLabError, match="no stack of decoder layers"), prune(made, DART(keep=2), visual=mask):
        pass
    assert not [name for name in vars(made) if "dart_lab" in name]


def test_one_prompt_is_no_batch_of_pictures() -> None:
    with pytest.raises(DartLabError, match="input_ids"):
        layout(small_llava(), {"pixel_values": batch(ONE)["pixel_values"]})


def test_a_mark_that_is_no_tensor_is_refused() -> None:
    model = small_llava()
    with (
        pytest.raises(DartLabError, match="visual is a list; give"),
        prune(model, Random(keep=2), visual=[[True]]),  # type: ignore[arg-type]
    ):
        model(**batch(ONE))


@pytest.mark.parametrize("layers", ["1", [1.5]])
def test_layers_to_record_are_whole_numbers(layers: Any) -> None:
    with pytest.raises(DartLabError, match="give whole numbers of decoder layers"):
        AttentionMass(layers=layers)


def test_a_mark_without_a_token_is_said() -> None:
    model, inputs = small_llava(), batch(ONE)
    none = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    with pytest.warns(DartLabWarning, match="nothing was pruned"), prune(model, Random(keep=2), visual=none) as run:
        model(**inputs)
    assert not run.kept
