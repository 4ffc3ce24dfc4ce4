"""Every bad input of the command line: its exit code, its one line, and nothing written; and what good input gives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dart_lab as dl
from dart_lab import cli, files
from dart_lab.pruners.registry import pruner_names
from tests.models import tiny_llava

GRID, LAYERS = 6, 4
VISUAL = GRID * GRID
QUESTION = "where is the red circle?"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Runner = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llava(tmp_path_factory.mktemp("models") / "random-llava", grid=GRID, layers=LAYERS))


@pytest.fixture
def picture(tmp_path: Path) -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (84, 84, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    def runner(*words: object) -> Result:
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return Result(int(stopped.value.code or 0), captured.out, captured.err)

    return runner


def one_line(result: Result, code: int, words: str) -> None:
    assert result.code == code, result
    assert result.out == ""
    assert result.err.count("\n") == 1 and result.err.startswith("dart-lab: "), result.err
    assert words in result.err
    assert "Traceback" not in result.err


def everything_in(folder: Path) -> set[tuple[str, bytes]]:
    return {(str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


# wrong words

@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prune"], "Missing argument"),
        (["prnue"], "prune"),
        (["list", "metods"], "Did you mean 'methods'?"),
        (["prune", "a.png", "why?", "--keeep", "3"], "--keep"),
        (["prune", "a.png", "why?", "--layer", "two"], "integer"),
        (["prune", "a.png", "why?", "--method", "divprune", "--layer", "3"], "before the language model; leave it out"),
        (["figure"], "position-bias"),
        (["figure", "positon-bias"], "Did you mean 'position-bias'?"),
        (["figure", "alll"], "Did you mean 'all'?"),
        (["figure", "all", "--from", "x.parquet"], "instead of 'all'"),
        (["prune", 300 * "a" + ".png", "why?"], "no such picture"),
        (["prune", "a.png", "why?", "--save", 300 * "a" + ".png"], "choose another place"),
        (["figure", "position-bias", "--out", 300 * "a"], "choose another place"),
    ],
)
def test_wrong_words_are_the_users_fault(run: Runner, words: list[str], message: str) -> None:
    one_line(run(*words), 2, message)


# prune: each fault is found before any model is loaded, and writes nothing

PRUNE_FAULTS = [
    (["--method", "dartt"], "Did you mean 'dart'?"),
    (["--keep", "0"], "keep"),
    (["--keep", "-3"], "keep"),
    (["--keep", "0.0"], "retention ratio"),
    (["--keep", "1.5"], "retention ratio"),
    (["--keep", "nan"], "retention ratio"),
    (["--keep", "many"], "number of tokens"),
    (["--layer", "0"], "layer"),
    (["--layer", str(LAYERS)], f"give 1 to {LAYERS - 1}"),
    (["--save", "kept.jpg"], "ends in .png"),
    (["--save", "."], ".png"),
    (["--method", "none-kept", "--keep", "5"], "keep"),
    (["--method", "dart:9", "--keep", "3"], "changes nothing"),
]


@pytest.mark.parametrize(("words", "message"), PRUNE_FAULTS)
def test_prune_refuses_before_loading(
    run: Runner, model: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: list[str], message: str,
) -> None:
    monkeypatch.setattr(dl, "load", lambda *_, **__: pytest.fail("a model was loaded"), raising=False)
    monkeypatch.chdir(tmp_path)
    before = everything_in(tmp_path)
    one_line(run("prune", picture, QUESTION, "--model", model, *words), 2, message)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    ("image", "question", "name", "message"),
    [
        ("nothing.png", QUESTION, None, "no such picture"),
        ("text.jpg", QUESTION, None, "not a picture"),
        (".", QUESTION, None, "is a folder"),
        (None, "  ", None, "question is empty"),
        (None, "is <image> red?", None, "image placeholder"),
        (None, QUESTION, "tinny", "Did you mean 'tiny'?"),
        (None, QUESTION, "./nowhere", "no such folder"),
    ],
)
def test_prune_refuses_bad_pictures_questions_and_models(
    run: Runner, model: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    image: str | None, question: str, name: str | None, message: str,
) -> None:
    monkeypatch.setattr(dl, "load", lambda *_, **__: pytest.fail("a model was loaded"), raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jpg").write_text("no picture")
    before = everything_in(tmp_path)
    one_line(run("prune", image or picture, question, "--model", name or model, "--save", "kept.png"), 2, message)
    assert everything_in(tmp_path) == before


def test_prune_never_writes_over_its_own_picture(run: Runner, model: str, picture: str) -> None:
    before = Path(picture).read_bytes()
    one_line(run("prune", picture, QUESTION, "--model", model, "--save", picture), 2, "the picture itself")
    assert Path(picture).read_bytes() == before


def test_keeping_more_than_there_are_is_refused_and_writes_nothing(
    run: Runner, model: str, picture: str, tmp_path: Path
) -> None:
    save = tmp_path / "kept.png"
    one_line(run("prune", picture, QUESTION, "--model", model, "--keep", VISUAL + 1, "--save", save), 2, str(VISUAL))
    assert not save.exists()


def test_a_full_disk_is_said_and_leaves_no_half_file(
    run: Runner, model: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, content: bytes) -> int:
        self.open("wb").write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    save = tmp_path / "out" / "kept.png"
    with monkeypatch.context() as patch:
        patch.setattr(files.Path, "write_bytes", full)
        result = run("prune", picture, QUESTION, "--model", model, "--keep", 9, "--save", save)
    assert "9 kept" in result.out, "the answers are not lost"
    one_line(replace(result, out=""), 1, "No space left on device")
    assert not list(tmp_path.rglob("*kept*"))


# figure: checked before anything is computed

@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", ""], "--data is empty"),
        (["--methods", "dart,fastw"], "Did you mean 'fastv'?"),
        (["--methods", "dart,,fastv"], "an entry is empty"),
        (["--methods", "dart:keep_radio=0.5"], "by name alone; give budgets with --keep"),
        (["--keep", "64,-1"], "keep"),
        (["--keep", "64,0"], "keep"),
        (["--n", "0"], "n="),
        (["--n", "1" + 30 * "0"], "give 1 to 1,000,000 samples"),
        (["--layer", "0"], "layer=0"),
        (["--model", "tinny"], "Did you mean 'tiny'?"),
        (["--data", "shaps"], "Did you mean 'shapes'?"),
        (["--from", "nothing.parquet"], "nothing.parquet"),
        (["--rolebook", "nothing.rolebook"], "reads no roles"),
        (["--rules", "dead=lens"], "reads no roles"),
        (["--rules", "dead=lense"], "Did you mean 'lens'?"),
        (["--rules", "dead"], "for example dead=unchanged"),
    ],
)
def test_figure_refuses_before_computing(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    from dart_lab.vlm import load

    monkeypatch.setattr(load, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    out = tmp_path / "figures"
    one_line(run("figure", "position-bias", "--out", out, *words), 2, message)
    assert not out.exists()


def test_a_rolebook_that_is_not_there_is_named(run: Runner, tmp_path: Path) -> None:
    words = ("figure", "role-map", "--out", tmp_path / "figures", "--rolebook", "nothing.rolebook")
    one_line(run(*words), 2, "make one with dart-lab roles fit")


def test_a_file_in_the_place_of_the_output_folder_is_refused(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "figures").write_text("mine")
    one_line(run("figure", "position-bias", "--out", tmp_path / "figures", "--n", 2), 2, "is a file")
    assert (tmp_path / "figures").read_text() == "mine"


# roles

@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["fit", "--images", "shaps"], 2, "neither a task nor a folder"),
        (["fit", "--n", "1"], 2, "give 2 or more"),
        (["fit", "--model", "tinny"], 2, "Did you mean 'tiny'?"),
        (["fit", "--batch", "0"], 2, "--batch"),
        (["show", "nothing.rolebook"], 2, "no such file"),
        (["rules", "nothing.rolebook", "--role", "dead"], 2, "no such file"),
        (["rules", "nothing.rolebook", "--role", "dea"], 2, "Did you mean 'dead'?"),
        (["rules", "nothing.rolebook", "--role", "dead", "--rules", "cosine,centroids"], 2, "Did you mean 'centroid'?"),
        (["rules", "nothing.rolebook"], 2, "--role"),
    ],
)
def test_roles_refuse_before_a_model_is_loaded(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str
) -> None:
    from dart_lab.vlm import load

    monkeypatch.setattr(load, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    one_line(run("roles", *words), code, message)
    assert not list(tmp_path.iterdir())


def test_the_seeds_of_the_pool_and_of_the_fit_vary_apart(run: Runner, tmp_path: Path, model: str) -> None:
    facts, digests = {}, {}
    for name, words in {
        "one": ("--seed", 1), "one said": ("--seed", 1, "--pool-seed", 1), "fit": ("--seed", 2, "--pool-seed", 1),
        "both": ("--seed", 2),
    }.items():  # fmt: skip
        book = tmp_path / f"{name}.rolebook"
        assert not run("roles", "fit", "--model", model, "--n", 6, "--out", book, *words).code
        facts[name], digests[name] = json.loads(run("roles", "show", book, "--json").out)["pool"], book.read_bytes()
    assert digests["one"] == digests["one said"]
    assert facts["fit"]["details"] == facts["one"]["details"] != facts["both"]["details"]
    assert facts["fit"]["seed"] == facts["both"]["seed"] == 2


def test_roles_are_fitted_shown_and_refused_for_another_model(run: Runner, tmp_path: Path, model: str) -> None:
    book = tmp_path / "book"
    done = run("roles", "fit", "--model", model, "--n", 12, "--out", book)
    assert done.code == 0 and done.out == f"{book}\n" and "pool: 12 pictures of shapes" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["book"]
    shown = run("roles", "show", book, "--model", model)
    assert shown.code == 0 and shown.out == done.err
    assert json.loads(run("roles", "show", book, "--json").out)["pool"]["pictures"] == 12
    one_line(run("roles", "show", book, "--model", "tiny"), 2, "other weights")
    kept = book.read_bytes()
    one_line(run("roles", "show", book, "--save", book), 2, "is the input")
    (tmp_path / "0.png").write_bytes(b"a picture")
    one_line(run("roles", "fit", "--model", model, "--n", 4, "--out", tmp_path / "0.png"), 2, "is no rolebook")
    assert book.read_bytes() == kept and (tmp_path / "0.png").read_bytes() == b"a picture"
    asked = ("--model", model, "--role", "dead", "--n", 3)
    compared = run("roles", "rules", book, *asked)
    assert compared.code == 0 and "left out leave-one-out: " in compared.err
    assert compared.out.startswith("a,b,kappa,ari,tokens,a share,b share\ncosine,largest-cluster,")
    two = run("roles", "rules", book, *asked, "--rules", "cosine,unchanged")
    assert two.code == 0 and len(two.out.splitlines()) == 2
    (tmp_path / "folder").mkdir()
    one_line(run("roles", "fit", "--model", model, "--n", 4, "--out", tmp_path / "folder"), 2, "is a folder")


# what goes wrong inside

def test_an_unexpected_error_is_one_line_unless_asked(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: str) -> list[tuple[str, str]]:
        raise RuntimeError("several\nlines")

    monkeypatch.setattr(cli, "_rows", broken)
    one_line(run("list", "methods"), 1, "unexpected RuntimeError: several lines; run again with --traceback")
    asked = run("list", "methods", "--traceback")
    assert asked.code == 1 and "Traceback" in asked.err


def test_an_interruption_is_130(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(kind: str) -> list[tuple[str, str]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_rows", interrupted)
    result = run("list", "methods")
    assert result.code == 130 and result.err == "dart-lab: stopped\n"


# what good input gives

def test_prune_answers_twice_and_saves_the_picture(run: Runner, model: str, picture: str, tmp_path: Path) -> None:
    save = tmp_path / "new" / "kept.png"
    result = run("prune", picture, QUESTION, "--model", model, "--keep", 9, "--layer", 2, "--json", "--save", save)
    assert (result.code, result.err) == (0, "")
    facts = json.loads(result.out)
    vlm = dl.load(model)
    with dl.prune(vlm, dl.pruners.DART(keep=9)) as record:
        pruned = vlm.ask([picture], [QUESTION])
    assert facts["answer"] == vlm.ask([picture], [QUESTION])[0]
    assert facts["pruned_answer"] == pruned[0]
    assert facts["kept_tokens"] == record.kept[0].tolist()
    assert (facts["asked"], facts["kept"], facts["visual_tokens"]) == (9, 9, VISUAL)
    assert facts["provenance"]["weights_sha256"] == vlm.weights_sha256
    with Image.open(save) as overlay:
        assert overlay.format == "PNG" and overlay.width == overlay.height
    assert [path.name for path in save.parent.iterdir()] == ["kept.png"]


def test_prune_says_what_was_asked_and_kept(run: Runner, model: str, picture: str) -> None:
    result = run("prune", picture, QUESTION, "--model", model, "--method", "random", "--keep", "0.25")
    assert result.code == 0
    assert f"kept 9 of {VISUAL} (asked 9) before decoder layer 2" in result.out
    assert run("prune", picture, QUESTION, "--model", model, "--method", "none-kept").out.count("kept 0 of") == 1


def test_the_same_seed_keeps_the_same_tokens(run: Runner, model: str, picture: str) -> None:
    words = ("prune", picture, QUESTION, "--model", model, "--method", "random", "--keep", 9, "--json")
    kept = [json.loads(run(*words, "--seed", seed).out)["kept_tokens"] for seed in (0, 0, 1)]
    assert kept[0] == kept[1] != kept[2]


def test_lists_name_everything_there_is(run: Runner) -> None:
    listed = [line.split()[0] for line in run("list", "methods").out.splitlines()]
    assert listed == pruner_names()
    assert run("list", "models").out.split()[0] == "tiny"
    assert run("list", "tasks").out.startswith("shapes")
    assert run("list", "figures").out == run("figure", "--list").out != ""


def test_doctor_finds_nothing_missing_here(run: Runner) -> None:
    result = run("doctor")
    assert result.code == 0, result.out
    assert ["ok", "torch", __import__("torch").__version__] in [line.split() for line in result.out.splitlines()]
    assert "torchvision" in result.out


def test_doctor_says_each_finding_before_it_looks_for_the_next(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dart_lab import doctor

    def broken() -> Iterator[doctor.Finding]:
        raise RuntimeError("torch cannot be asked")
        yield

    monkeypatch.setattr(doctor, "_torch", broken)
    result = run("doctor")
    assert result.code == 1 and "torch cannot be asked" in result.err
    assert "numpy" in result.out and "position-bias" in result.out and "torchvision" not in result.out


def test_doctor_says_which_kernel_a_model_uses_and_how_to_get_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from dart_lab import doctor

    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "flash_attn" else object())
    assert "needs a GPU" in doctor._kernels(gpu=False)
    assert "a model uses sdpa" in doctor._kernels(gpu=True) and "dart-lab[flash]" in doctor._kernels(gpu=True)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    assert "flex_attention, flash_attention_2" in doctor._kernels(gpu=True)


def test_doctor_fails_when_something_needed_is_missing(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from dart_lab import doctor

    monkeypatch.setattr(doctor, "requires", lambda _: ["no-such-package-of-dart-lab>=1", "absent; extra == 'flash'"])
    result = run("doctor")
    assert result.code == 1
    assert "MISSING  no-such-package-of-dart-lab" in result.out
    assert "dart-lab[flash]" in result.out


def test_version_and_help(run: Runner) -> None:
    assert run("--version").out == f"dart-lab {dl.__version__}\n"
    assert "Example" in run("prune", "--help").out
    assert run("-h").code == 0


def test_help_and_version_import_nothing_heavy() -> None:
    program = (
        "import sys\nfrom dart_lab.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib', 'pandas', 'umap') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_no_traceback() -> None:
    program = f"{sys.executable} -c 'from dart_lab.cli import main; main()' list tasks | true"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
