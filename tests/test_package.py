"""The package as a stranger gets it: what it ships, what it imports, and what its public parts say of themselves."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import dart_lab as dl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "transformers", "matplotlib", "seaborn", "pandas", "umap", "sklearn")
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()


def python(program: str, folder: Path, *path: Path) -> str:
    """Run a program in a fresh interpreter in `folder`; gives what it prints."""
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, check=True, capture_output=True, text=True,
        env={"PYTHONPATH": ":".join(map(str, path)), "PATH": ""},
    ).stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources alone, without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("dart_lab", "analysis"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next((source / "dist").glob("*.whl"))


def test_the_wheel_holds_every_source_file_and_the_model(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.getinfo(name).file_size for name in archive.namelist()}
    for folder, inside in ((ROOT / "dart_lab", "dart_lab"), (ROOT / "analysis", "dart_lab/analysis")):
        for file in folder.rglob("*.py"):
            assert f"{inside}/{file.relative_to(folder)}" in packed
    for file in (ROOT / "dart_lab" / "tiny" / "checkpoint").iterdir():
        assert packed[f"dart_lab/tiny/checkpoint/{file.name}"] == file.stat().st_size
    assert "dart_lab/py.typed" in packed
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    assert not any(name.startswith(("analysis", "tests")) for name in packed)


def test_the_wheel_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    program = (
        "import dart_lab.analysis.position_bias as figure, dart_lab\n"
        "from dart_lab.displays.figure import figure_names\n"
        "assert 'position-bias' in figure_names()\n"
        "print(figure.__file__, dart_lab.__version__)"
    )
    assert python(program, empty, site) == f"{site}/dart_lab/analysis/position_bias.py {dl.__version__}"


def test_this_installation_finds_the_analysis_from_any_folder(tmp_path: Path) -> None:
    assert Path(python("import dart_lab.analysis.position_bias as f; print(f.__file__)", tmp_path)).is_file()


def test_every_package_is_listed() -> None:
    found = {"dart_lab"} | {
        ".".join(folder.relative_to(ROOT).parts)
        for folder in (ROOT / "dart_lab").rglob("*")
        if folder.is_dir() and any(folder.glob("*.py"))
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | {"dart_lab.analysis"}


def test_importing_dart_lab_imports_nothing_heavy(tmp_path: Path) -> None:
    program = f"import dart_lab, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert python(program, tmp_path, ROOT) == "[]"


def test_the_rooms_keep_to_themselves(tmp_path: Path) -> None:
    """`pruners` never imports transformers, matplotlib or a room above it."""
    program = (
        "import sys, pkgutil, importlib, dart_lab.pruners as room\n"
        "for module in pkgutil.iter_modules(room.__path__, 'dart_lab.pruners.'): importlib.import_module(module.name)\n"
        "banned = ('transformers', 'matplotlib', 'seaborn', 'dart_lab.vlm', 'dart_lab.displays', 'dart_lab.analysis')\n"
        "print([name for name in banned if name in sys.modules])"
    )
    assert python(program, tmp_path, ROOT) == "[]"


@pytest.mark.parametrize(
    ("library", "home"),
    [("transformers", ("dart_lab/vlm", "dart_lab/tiny", "dart_lab/mini")), ("matplotlib", ("dart_lab/displays",)),
     ("seaborn", ("dart_lab/displays",))],
)
def test_only_one_room_imports_a_library(library: str, home: tuple[str, ...]) -> None:
    pattern = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
    outside = [
        str(file.relative_to(ROOT)) for file in (ROOT / "dart_lab").rglob("*.py")
        if pattern.search(file.read_text()) and not str(file.relative_to(ROOT)).startswith(home)
    ]
    assert outside == []


def test_every_lazy_name_exists_and_unknown_ones_are_explained() -> None:
    for name in dl.__all__:
        assert getattr(dl, name) is not None
    assert set(dl.__all__) <= set(dir(dl))
    assert python("import dart_lab as dl; print(dl.pruners.DART.name)", ROOT) == "dart"
    with pytest.raises(AttributeError, match="Did you mean 'prune'"):
        dl.prun  # noqa: B018


def test_everything_public_says_what_it_is() -> None:
    """A docstring of its own, inherited, or of the protocol it fulfils, for every public module, class and function."""
    from dart_lab.vlm.families.base import Family

    silent = []
    for file in (ROOT / "dart_lab").rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = import_module(name)
        silent += [] if module.__doc__ else [name]
        for label, thing in vars(module).items():
            own = getattr(thing, "__module__", None) == name and not label.startswith("_")
            if not (own and (inspect.isclass(thing) or inspect.isfunction(thing))):
                continue
            silent += [] if inspect.getdoc(thing) else [f"{name}.{label}"]
            for method, code in inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else []:
                own = code.__module__ == name and code.__name__ != "<lambda>" and not method.startswith("_")
                said = inspect.getdoc(getattr(thing, method)) or hasattr(Family, method)
                silent += [f"{name}.{label}.{method}"] if own and not said else []
    assert silent == []


def test_constraints_pin_every_dependency_once_and_nothing_local() -> None:
    pins = [line.split("==") for line in CONSTRAINTS if line and not line.startswith("#")]
    assert all(len(pin) == 2 and "+" not in pin[1] and "@" not in pin[0] for pin in pins)
    names = [name.lower().replace("_", "-") for name, _ in pins]
    assert len(names) == len(set(names))
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = list(PROJECT["project"]["dependencies"])
    wanted += [line for extra in ("dev", "ray", "datasets", "flash") for line in extras[extra]]
    versions = dict(zip(names, (version for _, version in pins), strict=True))
    for line in wanted:
        requirement = Requirement(line)
        assert requirement.specifier.contains(versions[requirement.name.lower().replace("_", "-")]), line
    assert "torchvision" not in names


def test_the_python_of_the_readme_does_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile("".join(code), "README.md", "exec"), scope)
    table = scope["run"].table()
    assert (len(scope["run"].kept[0]), len(table), int(table["kept"].sum())) == (64, 576, 64)
    printed = capsys.readouterr().out.splitlines()
    for columns in (("row", "column", "kept", "score"), ("layer", "key", "mass")):
        assert any(all(column in line for column in columns) for line in printed)


def test_the_commands_of_the_readme_exist() -> None:
    from dart_lab.cli import app

    used = set(re.findall(r"^dart-lab (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups}
    assert used and used <= known


def test_every_skip_has_its_line() -> None:
    listed = (ROOT / "tests" / "SKIPS.md").read_text()
    pattern = re.compile(r"pytest\.(?:mark\.)?(?:skip|importorskip|xfail)")
    skipping = [
        str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py")
        if file != Path(__file__) and pattern.search(file.read_text())
    ]
    assert [name for name in skipping if name not in listed] == []


def test_nothing_in_the_tree_names_this_machine() -> None:
    """No absolute path of somebody's home, of temporary or of locally installed files."""
    banned = re.compile(r"(?<![\w.])/(?:root|home|tmp|opt|mnt|srv)/\w")
    texts = [ROOT / "Makefile", ROOT / "README.md", ROOT / "constraints.txt", ROOT / "pyproject.toml"]
    texts += [file for folder in ("dart_lab", "analysis", "docs", "notebooks") for file in (ROOT / folder).rglob("*")
              if file.suffix in (".py", ".md", ".json", ".ipynb")]
    assert [str(file.relative_to(ROOT)) for file in texts if banned.search(file.read_text())] == []
