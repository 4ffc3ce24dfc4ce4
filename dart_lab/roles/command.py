"""`dart-lab roles …`: each command a few lines over the library."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Roles of visual tokens: fit rolebooks on pictures, look at them.")


@app.command(epilog="Example:  dart-lab roles fit --model tiny --images photos --out tiny.rolebook")
def fit(
    images: Annotated[str, typer.Option(help="A folder of pictures, or the name of a task.")] = "shapes",
    model: Annotated[str, typer.Option(help="'tiny', 'mini', a folder, or a hub id.")] = "tiny",
    out: Annotated[Path, typer.Option(help="File of the rolebook; a stopped fit goes on.")] = Path("model.rolebook"),
    n: Annotated[int | None, typer.Option(help="Pictures. Default: 1000 drawn ones, or all of a folder.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the pool, the clusters and the bootstrap.")] = 0,
    pool_seed: Annotated[
        int | None, typer.Option(help="Seed of the pool alone, to vary one and keep the other. Default: --seed.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Pictures in one pass.", min=1)] = 8,
    centred: Annotated[bool, typer.Option(help="Compare tokens less their mean vector.")] = False,
    least_depth: Annotated[
        float | None,
        typer.Option(help="Valley between dead and alive, 0 to 1; 0 cuts through a continuum.", min=0, max=1),
    ] = None,
    progress: Annotated[bool | None, typer.Option(help="Progress bar. Default: on a terminal.")] = None,
) -> None:
    """Find out on a pool of pictures which visual tokens are sinks, dead or alive, and save how to tell."""
    from dart_lab.files import check_targets, check_writable
    from dart_lab.roles.fit import Fit, fit_rolebook
    from dart_lab.roles.pool import open_pool
    from dart_lab.roles.rolebook import load_rolebook
    from dart_lab.vlm.load import check_model_name, load

    check_model_name(model)
    check_writable(out.parent)
    check_targets([out])
    if out.is_file():
        load_rolebook(out)  # which may be replaced, but nothing else
    pool = open_pool(images, n=n, seed=seed if pool_seed is None else pool_seed)
    shown = sys.stderr.isatty() if progress is None else progress
    how = Fit(centred=centred, least_depth=Fit.least_depth if least_depth is None else least_depth)
    book = fit_rolebook(load(model), pool, out, seed=seed, how=how, batch=batch, progress=shown)
    for line in book.lines():
        print(line, file=sys.stderr)
    typer.echo(out)


@app.command(epilog="Example:  dart-lab roles show tiny.rolebook")
def show(
    book: Annotated[Path, typer.Argument(help="File of a rolebook.")],
    model: Annotated[str | None, typer.Option(help="Check that the book is about this model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything but the centroids as JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Draw the evidence into this PNG.")] = None,
) -> None:
    """Print what a rolebook says."""
    from dart_lab.files import check_not_input, check_targets, check_writable, write_files
    from dart_lab.roles.rolebook import load_rolebook
    from dart_lab.vlm.load import check_model_name, load

    if model is not None:
        check_model_name(model)
    if save is not None:
        check_writable(save.parent)
        check_targets([save])
        check_not_input(save, book)
    found = load_rolebook(book, None if model is None else load(model))
    if save is not None:
        from dart_lab.displays.rolebook import draw_evidence
        from dart_lab.displays.style import png_bytes

        write_files({save: png_bytes(draw_evidence(found.facts()))})
    if as_json:
        typer.echo(json.dumps(found.facts(), ensure_ascii=False, indent=1))
        return
    for line in found.lines():
        typer.echo(line)


@app.command(epilog="Example:  dart-lab roles compare one.rolebook another.rolebook --model tiny")
def compare(
    books: Annotated[list[Path], typer.Argument(help="Files of two rolebooks or more, of the same model.")],
    model: Annotated[str, typer.Option(help="'tiny', 'mini', a folder, or a hub id.")] = "tiny",
    images: Annotated[str, typer.Option(help="A folder of pictures, or the name of a task.")] = "shapes",
    n: Annotated[int, typer.Option(help="Pictures on which they are compared.", min=2)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of these pictures; choose one that no book was fitted with.")] = 77,
    batch: Annotated[int, typer.Option(help="Pictures in one pass.", min=1)] = 8,
) -> None:
    """Print how far rolebooks agree on the same pictures: Cohen's kappa, of all roles and of each."""
    from dart_lab.errors import DartLabError
    from dart_lab.roles.pool import open_pool
    from dart_lab.roles.rolebook import load_rolebook
    from dart_lab.roles.stability import book_agreement
    from dart_lab.vlm.load import check_model_name, load

    if len(books) < 2:
        raise DartLabError("one rolebook has nothing to agree with; give two or more")
    check_model_name(model)
    found = {str(path): load_rolebook(path) for path in books}
    if len(found) < len(books):
        raise DartLabError("the same rolebook is given twice; give different ones")
    pool = open_pool(images, n=n, seed=seed)
    vlm = load(model)
    for path in books:
        load_rolebook(path, vlm)
    typer.echo(book_agreement(vlm, found, pool, batch=batch).to_csv(index=False, float_format="%.3f"), nl=False)


@app.command(epilog="Example:  dart-lab roles rules tiny.rolebook --model tiny --role dead")
def rules(
    book: Annotated[Path, typer.Argument(help="File of a rolebook.")],
    role: Annotated[str, typer.Option(help="vit-sink, llm-sink or dead.")],
    model: Annotated[str, typer.Option(help="'tiny', 'mini', a folder, or a hub id.")] = "tiny",
    names: Annotated[
        str | None, typer.Option("--rules", help="Rules, separated by commas. Default: all that are not slow.")
    ] = None,
    images: Annotated[str, typer.Option(help="A folder of pictures, or the name of a task.")] = "shapes",
    n: Annotated[int, typer.Option(help="Pictures on which they are compared.", min=2)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of these pictures; choose one that no book was fitted with.")] = 77,
    batch: Annotated[int, typer.Option(help="Pictures in one pass.", min=1)] = 8,
) -> None:
    """Print how far the definitions of a role agree: Cohen's kappa and the adjusted Rand index of every two."""
    from dart_lab.roles.pool import open_pool
    from dart_lab.roles.rolebook import load_rolebook
    from dart_lab.roles.rule_agreement import rule_agreement
    from dart_lab.roles.rules import rule_of
    from dart_lab.vlm.load import check_model_name, load

    chosen = None if names is None else [name.strip() for name in names.split(",")]
    for name in chosen or ("none",):
        rule_of(role, name)
    check_model_name(model)
    load_rolebook(book)
    pool = open_pool(images, n=n, seed=seed)
    vlm = load(model)
    table, left_out = rule_agreement(vlm, load_rolebook(book, vlm), pool, role, chosen, batch=batch)
    for name, reason in left_out.items():
        print(f"left out {name}: {reason}", file=sys.stderr)
    typer.echo(table.to_csv(index=False, float_format="%.3f"), nl=False)
