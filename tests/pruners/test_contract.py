"""The contract suite passes what is right and names what is wrong."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, FastV, FastVVis, KeepAll, NoneKept, Pruner, Random, ScorePruner, UniformGrid
from dart_lab.pruners.reduction import Reduction, mask_to_rows
from dart_lab.pruners.registry import BUILT_IN
from dart_lab.pruners.selectors import ascending, top_k
from dart_lab.testing import check_pruner


@pytest.mark.parametrize("method", [
    DART(keep=4), DART(epsilon=0.2), DART(keep=4, budget="official"), DART(keep=4, pivots="v_norm", certificate=True),
    DART(keep=4, pivots="attention", largest=False), DART(keep=4, pivots="random", text_pivots=0),
    DART(reduction_ratio=0.5, budget="official", official_path="epic"),
    FastV(keep=4), FastV(keep=4, query="mean"), FastV(keep=0.5, budget="official", rounding="int"), FastVVis(keep=4),
    Random(keep=4), UniformGrid(keep=4), NoneKept(), KeepAll(),
], ids=lambda method: method.name)
def test_own_methods_keep_the_contract(method: Pruner) -> None:
    check_pruner(method)


@pytest.mark.parametrize("method", [DART, FastV, Random, UniformGrid])
@pytest.mark.parametrize("wrong", [{"seed": "a"}, {"seed": 1.0}, {"seed": True}, {"layer": 1.0}, {"layer": 0}], ids=str)
def test_seeds_and_layers_are_whole_numbers(method: type[Pruner], wrong: dict[str, Any]) -> None:
    with pytest.raises(DartLabError, match="give a whole number"):
        method(keep=4, **wrong)


@dataclass(frozen=True, kw_only=True)
class Sound(ScorePruner):
    """What the broken ones below should be: ranks by the first channel of the states."""

    name: ClassVar[str] = "sound"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def score(self, signals):
        return torch.gather(signals.get("hidden")[:, :, 0], 1, signals.visual.clamp(min=0))


class Duplicate(Sound):
    def reduce(self, signals, asked):
        found = super().reduce(signals, asked)
        keep = found.keep.clone()
        if keep.shape[1] > 1:
            keep[:, 1] = keep[:, 0]
        return Reduction(keep=keep, size=found.size, asked=asked)


class Unsorted(Sound):
    def reduce(self, signals, asked):
        return Reduction(keep=top_k(self.score(signals), asked, signals.valid), size=signals.counts, asked=asked)


class OutOfSpan(Sound):
    def reduce(self, signals, asked):
        keep = super().reduce(signals, asked).keep
        return Reduction(keep=torch.where(keep >= 0, keep + 1, keep), size=signals.counts, asked=asked)


class TextDropped(Sound):
    def reduce(self, signals, asked):
        score = signals.get("hidden")[:, :, 0]
        keep = ascending(top_k(score, asked, signals.attended))
        return Reduction(keep=keep, size=signals.attended.sum(dim=1), asked=asked)


class WrongCount(Sound):
    def reduce(self, signals, asked):
        return super().reduce(signals, (asked - 1).clamp(min=1))


class TiesByChance(Sound):
    _generator: ClassVar[torch.Generator] = torch.Generator().manual_seed(0)

    def score(self, signals):
        score = super().score(signals)
        return score + 1e-6 * torch.rand(score.shape, generator=self._generator)


class BatchLeak(Sound):
    def reduce(self, signals, asked):
        score = self.score(signals)
        order = score.masked_fill(~signals.valid, float("-inf")).mean(dim=0, keepdim=True).expand_as(score)
        return Reduction(keep=ascending(top_k(order, asked, signals.valid)), size=signals.counts, asked=asked)


class StateKept(Sound):
    _calls: ClassVar[itertools.count] = itertools.count()

    def score(self, signals):
        return super().score(signals).roll(next(self._calls) % 5, dims=1)


class Undeclared(Sound):
    def score(self, signals):
        signals.get("keys")
        return super().score(signals)


class WritesIntoInputs(Sound):
    def score(self, signals):
        signals.get("hidden").add_(1)
        return super().score(signals)


class TiesToTheHigherIndex(Sound):
    def reduce(self, signals, asked):
        found = super().reduce(signals, asked)
        flipped = top_k(self.score(signals).flip(1), asked, signals.valid.flip(1))
        keep = torch.where(flipped >= 0, signals.visual.shape[1] - 1 - flipped, flipped)
        return Reduction(keep=ascending(keep), size=found.size, asked=asked, score=found.score)


class HeadOrder(Sound):
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    def score(self, signals):
        return signals.attention_to_visual(signals.last[:, None])[:, 0, 0]


class GlobalDraw(Sound):
    def score(self, signals):
        return super().score(signals) + torch.rand(1)


class Crash(Sound):
    def score(self, signals):
        return {}["missing"]


BROKEN = {
    Duplicate: "duplicate", Unsorted: "unsorted", OutOfSpan: "out of span", TextDropped: "text would be dropped",
    WrongCount: "wrong count", TiesByChance: "ties by chance", BatchLeak: "batch leak", StateKept: "state kept between",
    Undeclared: "'keys' without declaring", WritesIntoInputs: "modifies its input 'hidden'",
    TiesToTheHigherIndex: "ties against the rule", HeadOrder: "order of attention heads",
    GlobalDraw: "global generator", Crash: "raised KeyError",
}


def test_a_sound_method_passes() -> None:
    check_pruner(Sound, keep=4)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
def test_a_fault_is_named_in_one_line(broken: type[Pruner]) -> None:
    fixed = dataclass(frozen=True, kw_only=True)(broken)
    with pytest.raises(DartLabError, match=BROKEN[broken]) as caught:
        check_pruner(fixed, keep=4)
    assert "\n" not in str(caught.value)


def test_a_method_that_refuses_every_budget_is_not_passed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Shy(Sound):
        def asked(self, signals):
            raise DartLabError("shy: give me another budget")

    with pytest.raises(DartLabError, match="refuses every layout and budget"):
        check_pruner(Shy, keep=4)


def test_faults_of_the_class_are_named() -> None:
    class NotADataclass(Sound):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Misspelt(Sound):
        needs: ClassVar[frozenset[str]] = frozenset({"hiden"})

    @dataclass(frozen=True, kw_only=True)
    class Listed(Sound):
        needs: ClassVar[list[str]] = ["hidden"]

    for cls, fault in ((NotADataclass, "frozen dataclass"), (Misspelt, "'hidden'"), (Listed, "frozenset")):
        with pytest.raises(DartLabError, match=fault):
            check_pruner(cls, keep=4)


def test_a_method_that_decides_the_number_itself_is_accepted() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Positive(Pruner):
        name: ClassVar[str] = "positive"
        needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
        threshold: float = field(default=0.0)

        def _needs_keep(self):
            return False

        def reduce(self, signals, asked):
            first = torch.gather(signals.get("hidden")[:, :, 0], 1, signals.visual.clamp(min=0))
            mask = (first > self.threshold) & signals.valid
            return Reduction(keep=mask_to_rows(mask), size=signals.counts, asked=asked)

    check_pruner(Positive)


def test_pruners_know_no_model_and_no_picture() -> None:
    """The algebra imports torch, the standard library and itself only, and every method says how it differs."""
    folder = Path(__file__).parents[2] / "dart_lab" / "pruners"
    for path in sorted(folder.glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                allowed = name.split(".")[0] not in {"transformers", "matplotlib", "seaborn"}
                allowed &= not name.startswith("dart_lab") or name.startswith(("dart_lab.pruners", "dart_lab.errors"))
                assert allowed, f"{path.name} imports {name}"
    for target in BUILT_IN.values():
        source = (folder.parents[1] / (target.partition(":")[0].replace(".", "/") + ".py")).read_text(encoding="utf-8")
        assert "Differs from the official code in" in source, target
