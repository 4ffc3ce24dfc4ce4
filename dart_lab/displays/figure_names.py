"""Names of the figures that installed packages offer, and a line about each, without importing any of them."""

from __future__ import annotations

import ast
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

#: The entry-point group through which packages offer figures: `name = "package.module:FIGURE"`.
GROUP = "dart_lab.figures"


def figure_names() -> list[str]:
    """Names of the figures that installed packages offer, sorted.

    >>> "position-bias" in figure_names()
    True
    """
    return sorted(entry_points(group=GROUP).names)


def figure_summaries() -> dict[str, str]:
    """Name → one line about the figure, read from its file: the `summary=` of its `FigureSpec`; "" if it has no such.

    >>> figure_summaries()["kept-overlay"]
    'which visual tokens each method keeps, over the pictures'
    """
    return {point.name: _summary(point) for point in sorted(entry_points(group=GROUP))}


def _summary(point: EntryPoint) -> str:
    found = find_spec(point.module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return ""
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            given = {word.arg: word.value for word in statement.value.keywords}
            line = given.get("summary")
            if point.attr in names and isinstance(line, ast.Constant):
                return str(line.value)
    return ""
