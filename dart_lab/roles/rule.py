"""`Rule`: one definition of one role; and the rules that serve every role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.roles.clusters import nearest_centroid
from dart_lab.roles.labels import ROLES
from dart_lab.roles.lens import nearest_ids

if TYPE_CHECKING:
    from dart_lab.roles.rolebook import Rolebook
    from dart_lab.vlm.states import VisualStates

Flagged = tuple[Tensor, dict[str, Tensor]]
#: What a rule may need beside the tokens' vectors; all but the vocabulary are fields of `VisualStates`.
ATTENTION, RECEIVED, COLUMN_SUMS, EFFECT, VOCABULARY = "attention", "received", "column_sums", "effect", "vocabulary"
_LISTS, _COUNTS, _SHARES = ("channels", "ids"), {"after": 0, "nearest": 1}, ("share", "often")  # fields of rules
LENS_IDS = 3  # nearest ids that are looked at, as in the released code of EmbedLens


@dataclass(frozen=True)
class Rule(ABC):
    """One definition of one role; its fields are the numbers that it compares with.

    `needs` names what must be measured for it; `runs`: whether it reads inputs of decoder layers behind the first.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    runs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name))

    def _check(self, name: str, value: Any) -> None:
        what = f"{type(self).__name__}: {name}"
        if name in _LISTS:
            if value is not None and not isinstance(value, tuple):
                raise DartLabError(f"{what}={value!r}: give whole numbers in a tuple, such as (3, 17), or None")
            for number in value or ():
                check_whole(what, number, least=0)
        elif name in _COUNTS:
            check_whole(what, value, least=_COUNTS[name])
        elif name != "role" and (not _is_number(value) or (name in _SHARES and not 0 < value <= 1)):
            bound = " above 0 and at most 1" if name in _SHARES else ""
            raise DartLabError(f"{what}={value!r}: give a number{bound}")

    @abstractmethod
    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        """`(n,)` bool, and the scores that it was read from, name → `(n,)`.

        Raises:
            DartLabError: this model or book cannot serve the rule.
        """

    @property
    def at_input(self) -> bool:
        """Whether it can be told before the language model runs."""
        return not self.runs and not self.needs & {ATTENTION, RECEIVED, EFFECT}

    def layers(self, book: Rolebook) -> tuple[int, ...]:
        """Decoder layers whose inputs it reads."""
        return book.layers if self.runs or self.needs & {ATTENTION, RECEIVED} else ()


def _is_number(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return isfinite(float(value))
    except OverflowError:  # a whole number beyond every float
        return False


def no_token(states: VisualStates) -> Flagged:
    """A role that no token has."""
    return torch.zeros(len(states.embeds), dtype=torch.bool, device=states.embeds.device), {}


def by_picture(states: VisualStates, values: Tensor, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """`(n,)`: what `rule` makes of the values `(m,)` of each picture (or video) by itself."""
    image = torch.from_numpy(states.tokens.image).to(values.device)
    parts = [(image == number).nonzero()[:, 0] for number in image.unique()]
    if not parts:
        return rule(values)
    return torch.cat([rule(values[own]) for own in parts])[torch.cat(parts).argsort()]


def largest(values: Tensor, share: float) -> Tensor:
    """`(n,)` bool: the share of the tokens with the largest values, at least one; ties go to the lower index.

    >>> largest(torch.tensor([1.0, 3.0, 3.0]), 0.01).tolist()
    [False, True, False]
    """
    order = values.argsort(descending=True, stable=True)[: max(round(share * len(values)), 1)]
    return torch.zeros_like(values, dtype=torch.bool).index_fill(0, order, True)


def inputs_of(layers: tuple[int, ...], states: VisualStates, rule: Rule) -> Tensor:
    """`(layers, n, channels)` inputs of decoder layers. Raises `DartLabError` where the model did not run that far."""
    if not layers or any(layer not in states.layers for layer in layers):
        raise DartLabError(f"rule {type(rule).__name__} needs a run of the language model; leave when='run'")
    return torch.stack([states.layers[layer] for layer in layers])


@dataclass(frozen=True)
class NoToken(Rule):
    """No token has this role."""

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        return no_token(states)


@dataclass(frozen=True)
class NearestCentroid(Rule):
    """The nearest of all centroids is one of `role` (2608.04483)."""

    role: str

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        names = [name for name in ROLES if name in book.centroids]
        if self.role not in names:
            return no_token(states)
        table = torch.cat([book.centroids[name] for name in names])
        owner = torch.cat([torch.full((len(book.centroids[name]),), place) for place, name in enumerate(names)])
        found = nearest_centroid(book.centre(states.embeds), table.to(states.embeds.device))[0]
        return owner.to(found.device)[found] == names.index(self.role), {}


@dataclass(frozen=True)
class Lens(Rule):
    """One of the `nearest` 3 vocabulary ids is one of the role's (EmbedLens, 2603.00510).

    Attributes:
        role: whose words.
        ids: vocabulary ids, for example (1141,), (26673,) and (30296,) for the ViT sinks, LLM sinks and dead tokens of
            LLaVA-1.5-7B. Default: those nearest to the role's centroids in this model.
        nearest: how many ids of a token are looked at.
    """

    needs: ClassVar[frozenset[str]] = frozenset({VOCABULARY})
    role: str
    ids: tuple[int, ...] | None = None
    nearest: int = LENS_IDS

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        table = book.table
        if table is None:
            raise DartLabError("rule 'lens' compares with the vocabulary; give the book's table: book.with_table(vlm)")
        ids = book.words.get(self.role, []) if self.ids is None else self.ids
        if max(ids, default=0) >= len(table):
            raise DartLabError(f"ids={self.ids}: the vocabulary has ids 0 to {len(table) - 1}")
        if not len(ids):
            return no_token(states)
        return nearest_ids(book.centre(states.embeds), table, k=self.nearest).any_of(ids), {}
