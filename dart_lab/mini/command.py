"""`dart-lab get`: the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dart_lab.errors import DartLabError, did_you_mean

_NAMES = ("mini",)


def get(
    name: Annotated[str, typer.Argument(help="Name of the model: mini.")],
    to: Annotated[Path | None, typer.Option(help="Folder for it. Default: the user's cache.")] = None,
) -> None:
    """Fetch a model's pretrained parts once, put them together and print the folder; works offline afterwards."""
    from dart_lab.mini.get import get_mini

    if name not in _NAMES:
        raise DartLabError(f"there is nothing to get for {name!r}. {did_you_mean(name, _NAMES)}")
    typer.echo(get_mini(to, echo=lambda line: print(f"dart-lab: {line}", file=sys.stderr)))
