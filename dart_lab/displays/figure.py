"""A figure is a command: compute a table, write it, draw it; or draw it again from the table alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dart_lab.displays.figure_names import GROUP, figure_names
from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.files import check_targets, check_writable, write_files, write_somewhere
from dart_lab.probes.tables import facts_json, load_table, table_bytes
from dart_lab.probes.trace import load_trace, trace_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_SAMPLES = 1_000_000  # of one figure: its records are held in memory
ENDINGS = (".parquet", ".json", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """What a figure may be told. None: the figure's own default.

    Args:
        model: "tiny", a folder, or a hub id. Default "tiny".
        data: the name of a task, or a folder. None: the drawn world.
        methods: names of pruners.
        keep: budgets: whole numbers of visual tokens, or retention ratios in (0, 1].
        layer: K, the decoder layer before which tokens are dropped. Default 2.
        n: samples.
        seed: of the data, of methods that draw, and of the bootstrap. Default 0.
        out: the folder for the files. Default "figures".
        batch_size: samples in one pass of the model. Default 8.
        progress: show a progress bar on stderr; None: only on a terminal.
        rolebook: file of `dart-lab roles fit`, for figures about roles; None: they fit one on other pictures.
        rules: for these figures, role → rule (see docs/roles.md); None: the rules of the fit.
    """

    model: str = "tiny"
    data: str | None = None
    methods: tuple[str, ...] | None = None
    keep: tuple[int | float, ...] | None = None
    layer: int = 2
    n: int | None = None
    seed: int = 0
    out: Path = Path("figures")
    batch_size: int = 8
    progress: bool | None = None
    rolebook: Path | None = None
    rules: Mapping[str, str] | None = None


@dataclass(frozen=True, eq=False)
class FigureData:
    """What a figure is drawn from.

    Attributes:
        table: a trace, one row a visual token (see `dart_lab.probes.trace`), or what else the figure records.
        facts: provenance and every number of the picture, as plain JSON values; no times, no paths of output.
    """

    table: pd.DataFrame
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class FigureSpec:
    """One figure: how it is computed, drawn and put in words.

    Attributes:
        name: what the user types.
        summary: one line for `dart-lab figure --list`.
        compute: options and whether to show progress → data. Checks the options before it loads anything.
        draw: table and facts → a matplotlib figure; needs no model.
        lines: facts → the lines printed when the figure is made. Default none.
        trace: the table is a trace, one row a visual token. Default True; False: any table.
        roles: it reads a rolebook. Default False.
    """

    name: str
    summary: str
    compute: Callable[[FigureOptions, bool], FigureData]
    draw: Callable[[pd.DataFrame, Mapping[str, Any]], Figure]
    lines: Callable[[Mapping[str, Any]], list[str]] = lambda facts: []
    trace: bool = True
    roles: bool = False


def figure_spec(name: str) -> FigureSpec:
    """The figure of that name. Raises `DartLabError` for an unknown name or one that two packages claim."""
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        hint = did_you_mean(name, [*figure_names(), "all"])
        raise DartLabError(f"unknown figure {name!r}. {hint}")
    if len({point.value for point in found}) > 1:
        raise DartLabError(f"figure {name!r} is offered twice: {', '.join(sorted(p.value for p in found))}; remove one")
    spec: FigureSpec = found[0].load()
    return spec


def run_figure(
    name: str,
    options: FigureOptions,
    from_file: str | Path | None = None,
    echo: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> list[Path]:
    """Make a figure: `NAME.parquet`, `NAME.json`, `NAME.png` and `NAME.pdf` in `options.out`, all of them or none.

    Args:
        name: see `figure_names`.
        options: what to run; with `from_file`, only `out` matters.
        from_file: the Parquet file of an earlier run: draw again, without the model.
        echo: receives the lines that sum up the result. Default: stderr.

    Returns:
        The paths written.

    Raises:
        DartLabError: unknown figure, options at fault, a file that cannot be read or written.
    """
    spec = figure_spec(name)
    check_writable(options.out)
    check_targets(options.out / f"{name}{ending}" for ending in ENDINGS)
    if from_file is None:
        shown = sys.stderr.isatty() if options.progress is None else options.progress
        data = spec.compute(options, shown)
    else:
        table, facts = (load_trace if spec.trace else load_table)(from_file)
        if facts.get("figure") != name:
            raise DartLabError(f"{from_file} holds figure {facts.get('figure')!r}, not {name!r}; name that figure")
        data = FigureData(table, facts)
    files = figure_files(spec, data, options.out)
    paths = write_somewhere(files) if from_file is None else write_files(files)
    for line in spec.lines(data.facts):
        echo(line)
    return paths


def figure_files(spec: FigureSpec, data: FigureData, out: Path) -> dict[Path, bytes]:
    """The four files of a figure: path → bytes. The table and the facts are the same whenever the run is repeated."""
    from dart_lab.displays.style import house_style, pdf_bytes, png_bytes

    facts = {"figure": spec.name, **data.facts}
    with house_style():
        figure = spec.draw(data.table, facts)
    contents = (
        (trace_bytes if spec.trace else table_bytes)(data.table, facts),
        (facts_json(facts, indent=1) + "\n").encode(),
        png_bytes(figure),
        pdf_bytes(figure),
    )
    return {out / f"{spec.name}{ending}": content for ending, content in zip(ENDINGS, contents, strict=True)}
