"""The page of methods says what the methods do, and is up to date."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from dart_lab.pruners import DART, FastV, KeepAll, Pruner, Random, Schedule, Uniqueness, WindowFastV
from dart_lab.pruners.catalogue import ORIGINALS, VISUAL, Seen, acts, catalogue, example, watch
from dart_lab.pruners.reduction import Merge, Reduction
from dart_lab.pruners.registry import BUILT_IN
from tests.golden.test_golden import RUNNERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"


def test_the_page_is_up_to_date() -> None:
    command = "python -m dart_lab.pruners.catalogue > docs/methods.md"
    assert PAGE.read_text(encoding="utf-8") == catalogue(), f"run {command}"


def test_every_method_has_its_row() -> None:
    rows = [line for line in catalogue().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == sorted(BUILT_IN)
    columns = catalogue().split("|---|")[0].splitlines()[-1].count("|")
    assert {row.count("|") for row in rows} == {columns}


def test_golden_folders_belong_to_one_method_each_and_are_run() -> None:
    folders = [folder for original in ORIGINALS.values() for folder in original.golden]
    assert len(folders) == len(set(folders))
    assert set(RUNNERS) - set(folders) <= {"embedlens"}, "a golden folder without a method in ORIGINALS"
    unknown = {f for name, o in ORIGINALS.items() if name in BUILT_IN for f in o.golden} - set(RUNNERS)
    assert not unknown, "the page promises parity that no test shows"


def test_methods_with_a_paper_state_the_licence_of_the_original() -> None:
    missing = [name for name in BUILT_IN if example(name).paper and name not in ORIGINALS]
    assert not missing, "add them to ORIGINALS"


@pytest.mark.parametrize(("method", "seen"), [
    (FastV(keep=9), Seen(1, False, False)), (FastV(keep=9, query="mean"), Seen(5, False, False)),
    (FastV(keep=9, query=(0, 1, -1)), Seen(3, False, False)), (DART(keep=9), Seen(0, False, False)),
    (WindowFastV(keep=9), Seen(1, False, False)), (Random(keep=9), Seen(0, False, False)),
])
def test_what_is_read_of_the_attention_is_seen(method: Pruner, seen: Seen) -> None:
    assert watch(method) == seen


@dataclass(frozen=True, kw_only=True)
class Greedy(Random):
    """Looks at everything and merges."""

    name: ClassVar[str] = "greedy"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "received"})

    def reduce(self, signals, asked) -> Reduction:
        signals.get("received")
        signals.attention(signals.visual)
        found = super().reduce(signals, asked)
        return Reduction(keep=found.keep, size=found.size, asked=asked, merge=Merge.from_dense(found.weights()))


def test_whole_maps_sums_and_merges_are_seen() -> None:
    assert watch(Greedy(keep=9)) == Seen(VISUAL, True, True)


@pytest.mark.parametrize(("method", "words"), [
    (FastV(keep=9, layer=3), "before decoder layer K = 3"), (KeepAll(), "before decoder layer K = 2"),
    (Schedule("2:fastv:9;7:random:4"), "before decoder layers 2, 7"),
    (Schedule({k: Uniqueness(keep=9) for k in (4, 5, 6)}), "before decoder layers 4 to 6"),
])
def test_where_a_method_acts_in_words(method: Pruner, words: str) -> None:
    assert acts(method.parts()) == words


def test_the_examples_go_by_their_names() -> None:
    assert [example(name).name for name in BUILT_IN] == list(BUILT_IN)
