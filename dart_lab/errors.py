"""The errors a user can cause, and the help that goes with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any


class DartLabError(ValueError):
    """The input is at fault: says what was given, what was expected and what to do, in one line.

    The command line prints the message alone and exits with code 2.
    """


class StorageError(DartLabError):
    """The disk is full or broken: the input is not at fault. The command line exits with code 1."""


class DartLabWarning(UserWarning):
    """Nothing failed, but the result may not be what was meant (for example: nothing was pruned)."""


def check_whole(what: str, value: Any, least: int | None = None, hint: str = "") -> None:
    """Refuse what is no whole number; `what` names it in the error.

    Raises:
        DartLabError: not a whole number (True and 1.0 are none), or less than `least`.

    >>> check_whole("n", 3, least=1)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise DartLabError(f"{what}={value!r}: give a whole number{bound}{hint and '; ' + hint}")


def did_you_mean(given: str, options: Iterable[str]) -> str:
    """Return `` Did you mean 'x'? Known: …`` for an unknown name, nearest first.

    >>> did_you_mean("fastw", ["dart", "fastv"])
    "Did you mean 'fastv'? Known: dart, fastv."
    """
    known = sorted(options)
    near = difflib.get_close_matches(given.lower(), known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Known: {', '.join(known)}."
