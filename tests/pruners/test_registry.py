"""Methods by name."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import dart_lab.pruners as pruners
from dart_lab.errors import DartLabError
from dart_lab.pruners import DART, FastV, Random, make_pruner, pruner_class, pruner_names, registry


def test_every_name_leads_to_a_class_of_that_name() -> None:
    for name in registry.BUILT_IN:
        assert pruner_class(name).name == name
    assert {"dart", "fastv", "fastv-vis", "random", "uniform-grid", "none-kept", "keep-all"} <= set(pruner_names())


def test_parameters_reach_the_class() -> None:
    assert make_pruner("dart", keep=0.25, layer=3, text_pivots=0) == DART(keep=0.25, layer=3, text_pivots=0)
    assert make_pruner("fastv", keep=9, query="mean") == FastV(keep=9, query="mean")


@pytest.mark.parametrize(("name", "parameters", "text"), [
    ("fastw", {}, "Did you mean 'fastv'"),
    ("DART", {"keep": 4}, "Did you mean 'dart'"),
    ("dart", {"keep_radio": 0.5}, "no parameter 'keep_radio'. Did you mean 'keep'"),
    ("dart", {"keep": 4, "image_pivot": 2}, "Did you mean 'image_pivots'"),
    ("random", {}, "keep is missing"),
])
def test_mistakes_get_the_nearest_right_name(name, parameters, text) -> None:
    with pytest.raises(DartLabError, match=text):
        make_pruner(name, **parameters)


def installed(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    found = [EntryPoint(name.replace("_", "-"), target, registry.GROUP) for name, target in targets.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry for entry in found if entry.group == group])


def test_other_packages_add_methods(monkeypatch) -> None:
    installed(monkeypatch, mine="dart_lab.pruners.random:Random")
    assert make_pruner("mine", keep=3) == Random(keep=3)
    assert "mine" in pruner_names()


def test_a_name_taken_twice_is_an_error(monkeypatch) -> None:
    installed(monkeypatch, dart="other.package:DART")
    with pytest.raises(DartLabError, match=r"'dart' is taken twice, by dart_lab\.pruners\.dart:DART and by other"):
        pruner_names()


def test_a_target_that_is_no_method_is_an_error(monkeypatch) -> None:
    installed(monkeypatch, broken="dart_lab.errors:DartLabError")
    with pytest.raises(DartLabError, match="not a Pruner class"):
        make_pruner("broken")


def test_the_package_exports_lazily() -> None:
    for name in pruners.__all__:
        assert getattr(pruners, name).__name__ == name or name == "BudgetMode"
    assert "DART" in dir(pruners)
    with pytest.raises(AttributeError, match="no attribute 'DRAT'"):
        _ = pruners.DRAT
    code = "import dart_lab.pruners, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
