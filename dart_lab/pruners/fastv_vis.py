"""FastV_VIS: FastV with the last visual token as the query, so that no question is involved (arXiv 2502.11501)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dart_lab.pruners.fastv import FastV, NamedQuery


@dataclass(frozen=True, kw_only=True)
class FastVVis(FastV):
    """FastV whose query is the last visual token: it stands before the question and cannot see it.

    Parameters are those of `FastV`.

    >>> FastVVis(keep=0.25).query
    'last_visual'

    Differs from the official code in: none was released; the paper's text is the source. With several images the last
    token of the last image ranks them all.
    """

    name: ClassVar[str] = "fastv-vis"
    paper: ClassVar[str] = "Token Pruning in Multimodal LLMs: Are We Solving the Right Problem?, arXiv 2502.11501"

    query: NamedQuery | tuple[int, ...] = "last_visual"
