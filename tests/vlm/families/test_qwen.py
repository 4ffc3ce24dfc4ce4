"""Qwen-VL: kept tokens keep their positions, and every visual token lies where it should."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.pruners import DART, DivPrune, FastV, Pruner, Random, Schedule
from dart_lab.vlm import compat
from dart_lab.vlm.insert import prune
from dart_lab.vlm.locate import layout
from dart_lab.vlm.masking import mask_drop
from tests.vlm.families.qwen_models import CLASSES, IMAGE, VIDEO, qwen_batch, qwen_model

ONE, PADDED = (((4, 6),),), (((4, 6),), ((3, 2), (5, 4)))
STEPS = 8


def answer(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens and the logits of each step."""
    out = model.generate(
        **inputs, max_new_tokens=STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True,
        suppress_tokens=[2, IMAGE, VIDEO], **options,
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("kind", CLASSES)
def test_kept_tokens_keep_their_three_positions(kind: str) -> None:
    model, inputs = qwen_model(kind), qwen_batch(ONE)
    seen: list[Tensor] = []
    last = compat.text_model(model).layers[-1].self_attn
    hook = last.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_embeddings"][0]), with_kwargs=True
    )
    answer(model, inputs)
    plain, seen[:] = list(seen), []
    with prune(model, Random(keep=5)) as run:
        answer(model, inputs)
    hook.remove()
    stays = inputs["input_ids"][0] != IMAGE
    stays[torch.from_numpy(run.positions[0])] = True
    assert torch.equal(seen[0], plain[0][..., stays, :])
    assert all(torch.equal(a, b) for a, b in zip(seen[1:], plain[1:], strict=True)) and len(seen) == STEPS


def test_layout_of_pictures_of_unlike_shapes() -> None:
    model, inputs = qwen_model("qwen2_5_vl"), qwen_batch(PADDED)

    class Picture:
        def __init__(self, *size: int) -> None:
            self.size = size

    found = layout(model, inputs, [Picture(60, 40), Picture(10, 30), Picture(8, 5)])
    assert [found.grid(0), found.grid(1, 0), found.grid(1, 1)] == [(4, 6), (3, 2), (5, 4)]
    assert found.samples[0].box[7].tolist() == [10, 10, 20, 20]
    assert found.samples[1].box[[0, 5, 6, 25]].tolist() == [[0, 0, 5, 10], [5, 20, 10, 30], [0, 0, 2, 1], [6, 4, 8, 5]]


@pytest.mark.parametrize("kind", CLASSES)
def test_run_knows_the_grid_in_generate(kind: str) -> None:
    model, inputs = qwen_model(kind), qwen_batch(PADDED)
    with prune(model, Random(keep=5)) as run:
        answer(model, inputs, num_beams=2)
    table = run.table()
    assert table.groupby(["sample", "image"])[["row", "column"]].max().to_numpy().tolist() == [[3, 5], [2, 1], [4, 3]]


def test_what_cannot_be_right_is_refused() -> None:
    inputs = qwen_batch(ONE)
    model = qwen_model("qwen2_vl")
    with pytest.raises(DartLabError, match="cuts an image"):
        layout(model, {**inputs, "input_ids": inputs["input_ids"][:, :12]})
    with pytest.raises(DartLabError, match="videos but no video_grid_thw"):
        layout(model, {"input_ids": torch.tensor([[1, VIDEO]])})
    video = qwen_batch((((2, 2, 3), (2, 3)),))
    with pytest.raises(DartLabError, match="cuts an image"):
        layout(model, {**video, "input_ids": video["input_ids"][:, :12]})


@pytest.mark.parametrize("timed", [False, True], ids=["whole", "timed"])
def test_layout_of_videos_between_pictures(timed: bool) -> None:
    """Pictures and videos keep the order of the prompt, which their grids do not say."""
    model = qwen_model("qwen3_vl" if timed else "qwen2_vl")
    inputs = qwen_batch([((2, 2, 3), (2, 3)), ((3, 2), (3, 2, 2), (4, 2))], timed=timed)
    first, second = layout(model, inputs).samples
    for sample, want in ((first, [(0, 2, 2, 3), (1, 1, 2, 3)]), (second, [(0, 1, 3, 2), (1, 3, 2, 2), (2, 1, 4, 2)])):
        at = 0
        for image, steps, rows, columns in want:
            n = steps * rows * columns
            here = slice(at, at + n)
            cells = [(image, t, r, c) for t in range(steps) for r in range(rows) for c in range(columns)]
            found = np.stack([sample.image, sample.frame, sample.row, sample.column], axis=1)[here]
            assert found.tolist() == [list(cell) for cell in cells]
            at += n
        assert at == len(sample)
    video = [*(first.image == 0), *(second.image == 1)]
    ids = [inputs["input_ids"][row, sample.position] for row, sample in enumerate((first, second))]
    assert [token == VIDEO for token in torch.cat(ids).tolist()] == video


EARLY = [FastV(keep=5, layer=1), Schedule({1: FastV(keep=9), 2: DART(keep=4)})]


@pytest.mark.parametrize("pruner", EARLY, ids=["1", "1, 2"])
@pytest.mark.parametrize("prompts", [ONE, PADDED], ids=["one", "padded"])
def test_features_behind_the_first_layers_reach_the_tokens_that_are_left(prompts: Any, pruner: Pruner) -> None:
    """Qwen3-VL adds features behind layers 0 and 1; masking leaves the sequence whole, and so what is added."""
    model, inputs = qwen_model("qwen3_vl"), qwen_batch(prompts)
    with prune(model, pruner) as run:
        tokens, logits = answer(model, inputs)
    with ExitStack() as stack:
        for number, part in enumerate(pruner.parts()):
            hidden = inputs["input_ids"] == IMAGE
            for row, sample in enumerate(run.samples):
                kept = sample.tokens.position[sample.decisions[number].kept]
                hidden[row, torch.from_numpy(kept)] = False
            stack.enter_context(mask_drop(model, hidden, layer=part.stage.layer))
        masked_tokens, masked_logits = answer(model, inputs)
    assert torch.equal(tokens, masked_tokens)
    torch.testing.assert_close(logits, masked_logits, atol=1e-5, rtol=0)
    with torch.no_grad():  # and the model is as it was
        assert "_deepstack_process" not in vars(compat.text_model(model))


@pytest.mark.parametrize("prompts", [ONE, PADDED], ids=["one", "padded"])
@pytest.mark.parametrize("kind", CLASSES)
def test_dropping_before_the_language_model_equals_masking_everywhere(kind: str, prompts: Any) -> None:
    """Three rows of positions cannot be renumbered, so the original ones stay, and a warning says so."""
    model, inputs, pruner = qwen_model(kind), qwen_batch(prompts), DivPrune(keep=5)
    with pytest.warns(DartLabWarning, match="keep their original positions"), prune(model, pruner) as run:
        tokens, logits = answer(model, inputs)
    hidden = inputs["input_ids"] == IMAGE
    for row, positions in enumerate(run.positions):
        assert len(positions) == 5
        hidden[row, torch.from_numpy(positions)] = False
    with mask_drop(model, hidden, layer=0):
        masked_tokens, masked_logits = answer(model, inputs)
    assert torch.equal(tokens, masked_tokens)
    torch.testing.assert_close(logits, masked_logits, atol=1e-5, rtol=0)
