"""`dart-lab study …`: each command a few lines over the library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dart_lab.errors import DartLabError

app = typer.Typer(no_args_is_help=True, help="Run conditions × samples; resumable, with records that survive.")

_Folder = Annotated[Path, typer.Argument(help="Folder of the study.")]
_Executor = Annotated[str, typer.Option(help="'local', or 'ray' for many GPUs or nodes.")]
_Workers = Annotated[int | None, typer.Option(help="Workers of Ray. Default: one a GPU, or 2 without any.")]
_Part = Annotated[str, typer.Option(help="I/K: run every K-th block from the I-th on; merge the folders afterwards.")]
_Progress = Annotated[bool | None, typer.Option(help="Progress bar. Default: on a terminal.")]


@app.command(epilog="Example:  dart-lab study run alpha.toml --out runs/alpha")
def run(
    file: Annotated[Path, typer.Argument(help="The study, a TOML file.")],
    out: Annotated[Path, typer.Option(help="Folder for plan, records and provenance.")],
    executor: _Executor = "local",
    workers: _Workers = None,
    part: _Part = "1/1",
    progress: _Progress = None,
) -> None:
    """Run a study, or go on with it where it stopped."""
    from dart_lab.studies.plan import read_study
    from dart_lab.studies.run import run_study

    made = run_study(read_study(file), out, executor=executor, workers=workers, part=_part(part), progress=progress)
    typer.echo(made)


@app.command(epilog="Example:  dart-lab study resume runs/alpha")
def resume(
    folder: _Folder, executor: _Executor = "local", workers: _Workers = None, part: _Part = "1/1",
    progress: _Progress = None,
) -> None:  # fmt: skip
    """Go on with the study of a folder."""
    from dart_lab.studies.run import resume_study

    typer.echo(resume_study(folder, executor=executor, workers=workers, part=_part(part), progress=progress))


@app.command(epilog="Example:  dart-lab study status runs/alpha")
def status(folder: _Folder) -> None:
    """Say how far a study is."""
    from dart_lab.studies.run import status_of

    found = status_of(folder)
    typer.echo(f"{found.done} of {found.cells} blocks done, {found.records} records, {found.failures} failures")


@app.command(epilog="Example:  dart-lab study merge runs/a runs/b --out runs/alpha")
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders of the parts of one study.")],
    out: Annotated[Path, typer.Option(help="Folder for the whole.")],
) -> None:
    """Put parts that several machines ran together."""
    from dart_lab.studies.run import merge_folders

    typer.echo(merge_folders(folders, out))


@app.command(epilog="Example:  dart-lab study export runs/alpha --out alpha.csv")
def export(folder: _Folder, out: Annotated[Path, typer.Option(help="File to write: .csv, .json or .parquet.")]) -> None:
    """Write the records of a finished study in another format."""
    from dart_lab.files import check_writable, write_files
    from dart_lab.studies.store import Store

    table = Store.open(folder).records()
    writers = {
        ".csv": lambda: table.to_csv(index=False).encode(),
        ".json": lambda: (table.to_json(orient="records", force_ascii=False, indent=1) + "\n").encode(),
        ".parquet": lambda: table.to_parquet(index=False),
    }
    if out.suffix not in writers:
        raise DartLabError(f"--out {out}: give a file that ends in {', '.join(writers)}")
    check_writable(out.parent)
    write_files({out: writers[out.suffix]()})
    typer.echo(out)


def _part(text: str) -> tuple[int, int]:
    """`I/K` as (I − 1, K)."""
    first, slash, count = text.partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise DartLabError(f"--part {text!r}: give I/K with I from 1 to K, for example 1/4")
    return int(first) - 1, int(count)
