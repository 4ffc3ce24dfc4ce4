"""Published schedules on models of other depths."""

from __future__ import annotations

import pytest

from dart_lab.errors import DartLabError
from dart_lab.pruners import pruner_names
from dart_lab.pruners.counting import planned
from dart_lab.pruners.fitting import (
    ENDS_WITH,
    PUBLISHED_BLOCKS,
    PUBLISHED_DEPTH,
    SCHEDULED,
    UNFIT,
    Depth,
    fit,
    processed,
)
from dart_lab.pruners.mustdrop import MustDrop
from dart_lab.pruners.pyramiddrop import PyramidDrop
from dart_lab.pruners.sparsevlm import SparseVLM
from dart_lab.pruners.tome import ToMe

LLAVA = Depth(layers=PUBLISHED_DEPTH, blocks=PUBLISHED_BLOCKS, visual=576)


@pytest.mark.parametrize(
    "depth", [LLAVA, Depth(layers=8, blocks=4, visual=576), Depth(layers=28, blocks=26, visual=1024)]
)
@pytest.mark.parametrize("keep", [192, 64])
def test_every_method_fits_every_depth_or_says_why(depth: Depth, keep: int) -> None:
    for name in pruner_names():
        if name in UNFIT:
            with pytest.raises(DartLabError, match=name):
                fit(name, keep=keep, depth=depth)
            continue
        method = fit(name, keep=keep, depth=depth)
        for part in method.parts():
            last = depth.layers if part.stage.kind in ("LLM_LAYER", "POST_PREFILL_CACHE") else depth.blocks or 0
            assert 0 <= part.stage.layer < max(last, 1), (name, part)
        if name in ("mustdrop", "none-kept", "keep-all"):
            continue
        kept = planned(method, visual=depth.visual).kept
        average = sum(processed(kept, depth)) / depth.layers
        if name in SCHEDULED and name not in ENDS_WITH:
            near = 1 if depth.visual == 576 else depth.visual / depth.layers  # schedules were published for 576 tokens
            target = (2 * depth.visual + (depth.layers - 2) * keep) / depth.layers
            assert average == pytest.approx(target, abs=near), name
        elif name != "elastic-cache":
            assert list(kept.values())[-1] == keep, name


def test_at_the_published_depth_the_published_layers_come_back() -> None:
    assert fit("sparsevlm", keep=64, depth=LLAVA).layers == SparseVLM(keep=64).layers
    assert fit("mustdrop", keep=64, depth=LLAVA).layers == MustDrop().layers
    assert fit("tome", keep=64, depth=LLAVA).blocks == ToMe(keep=64).blocks
    pyramid = fit("pyramiddrop", keep=166, depth=LLAVA)
    assert [part.layer for part in pyramid.parts()] == [part.layer for part in PyramidDrop(keep=192).parts()]


def test_what_cannot_be_fitted_says_what_could() -> None:
    with pytest.raises(DartLabError, match="do not fit into 3"):
        fit("mustdrop", keep=8, depth=Depth(layers=3, blocks=2, visual=64))
    with pytest.raises(DartLabError, match="cannot be reduced inside"):
        fit("tome", keep=8, depth=Depth(layers=8, blocks=None, visual=64))
    with pytest.raises(DartLabError, match="no pruning method"):
        fit("fastw", keep=8, depth=LLAVA)
