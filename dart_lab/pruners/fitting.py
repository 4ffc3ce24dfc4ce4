"""Published methods on a model of another depth: their layers at the same share of it, their budget on one scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.counting import planned
from dart_lab.pruners.registry import make_pruner

PUBLISHED_DEPTH = 32  # decoder layers of the models that the schedules were published for
PUBLISHED_BLOCKS = 23  # vision blocks that their features pass through


@dataclass(frozen=True, kw_only=True)
class Depth:
    """How deep a model is.

    Attributes:
        layers: decoder layers.
        blocks: vision blocks that the features pass through; None: no method may act inside the tower.
        visual: visual tokens of a prompt.
    """

    layers: int
    blocks: int | None
    visual: int


def fit(name: str, *, keep: int, depth: Depth, layer: int = 2, seed: int = 0) -> Pruner:
    """A registered method, with default parameters, for a model of any depth and a budget that compares.

    * Methods with one cut, and those before the language model, keep `keep` tokens.
    * Methods that cut at several layers act at the same shares of the depth as published; their budget is such that the
      tokens each layer processes average to what one cut before `layer` to `keep` gives, as near as whole tokens go.
      Two end with `keep` tokens instead: `ficoco-l`, which falls in every layer and cannot average so low, and
      `mustdrop`, whose numbers depend on the picture.
    * Methods inside the tower act in the same share of its blocks and hand on `keep` tokens.

    Args:
        name: one of `pruner_names()`.
        keep: visual tokens that stay after a single cut.
        depth: of the model.
        layer: K of methods with a single cut. Default 2.
        seed: for methods that draw.

    Raises:
        DartLabError: an unknown method, or one that cannot be fitted to this depth or budget; says why.

    >>> fit("pyramiddrop", keep=64, depth=Depth(layers=8, blocks=4, visual=576)).layers
    (1, 3, 5)
    >>> fit("dart", keep=64, depth=Depth(layers=8, blocks=4, visual=576)).keep
    64
    """
    if name in BUDGETLESS:
        return make_pruner(name, layer=layer, seed=seed)
    if name in IN_TOWER and depth.blocks is None:
        raise DartLabError(f"{name}: this vision tower cannot be reduced inside")
    if name in UNFIT:
        raise DartLabError(f"{name}: {UNFIT[name]}")
    rule = SCHEDULED.get(name)
    if rule is None:
        return make_pruner(name, keep=keep, layer=layer, seed=seed)
    parameters = rule(depth)
    if name in ENDS_WITH:
        return make_pruner(name, keep=keep, seed=seed, **parameters)
    target = (layer * depth.visual + (depth.layers - layer) * keep) / depth.layers
    return nearest_average(lambda n: make_pruner(name, keep=n, seed=seed, **parameters), target, depth)


def nearest_average(make: Callable[[int], Pruner], target: float, depth: Depth) -> Pruner:
    """Of `make(1)`, `make(2)`, … the method whose layers process the average nearest to `target`.

    The average must not fall as the number rises. Raises `DartLabError` if no number comes within a token a layer.
    """
    low, high = 1, depth.visual
    while low < high:
        middle = (low + high) // 2
        if _average(make, middle, depth) < target:
            low = middle + 1
        else:
            high = middle
    best = min((n for n in (low - 1, low) if n >= 1), key=lambda n: (abs(_average(make, n, depth) - target), n))
    found = _average(make, best, depth)
    if abs(found - target) > depth.visual / depth.layers:
        raise DartLabError(
            f"{make(best).name}: a layer average of {target:.1f} of {depth.visual} tokens is out of reach over "
            f"{depth.layers} layers; the nearest is {found:.1f}"
        )
    return make(best)


def processed(kept: Mapping[int, int], depth: Depth) -> list[int]:
    """Visual tokens that each decoder layer processes; `kept`: layer → tokens from there on.

    >>> processed({2: 5}, Depth(layers=4, blocks=None, visual=9))
    [9, 9, 5, 5]
    """
    out, now = [], depth.visual
    for layer in range(depth.layers):
        now = kept.get(layer, now)
        out.append(now)
    return out


def _average(make: Callable[[int], Pruner], number: int, depth: Depth) -> float:
    """Tokens that a layer processes on average; 0 where the method cannot do with so few, all where with so many."""
    try:
        method = make(number)
        return sum(processed(planned(method, visual=depth.visual).kept, depth)) / depth.layers
    except DartLabError:
        return 0.0 if number < depth.visual // 2 else float(depth.visual)


def _at(layers: tuple[int, ...], depth: Depth, *, least: int = 1) -> tuple[int, ...]:
    """Published layers at the same share of a model's depth: rising, from `least` on, each its own."""
    out: list[int] = []
    for place in layers:
        out.append(max(int(place * depth.layers / PUBLISHED_DEPTH + 0.5), out[-1] + 1 if out else least))
    if out[-1] >= depth.layers:
        raise DartLabError(
            f"the method's {len(layers)} cuts do not fit into {depth.layers} decoder layers; make it with your layers="
        )
    return tuple(out)


def _blocks(first: int, depth: Depth) -> dict[str, int]:
    """FiCoCo-V's blocks: from the same share of the tower to its end."""
    blocks = depth.blocks or PUBLISHED_BLOCKS
    start = min(int(first * blocks / PUBLISHED_BLOCKS + 0.5), blocks - 1)
    return {"first": start, "blocks": blocks - start}


def _from(layer: int, depth: Depth) -> dict[str, int]:
    """FiCoCo-L's layers: from the same share of the decoder to its end."""
    start = _at((layer,), depth)[0]
    return {"layer": start, "layers": depth.layers - start}


#: Method → its parameters at a depth, from the published layers.
SCHEDULED: Mapping[str, Callable[[Depth], dict[str, Any]]] = MappingProxyType(
    {
        "ficoco-l": lambda depth: _from(5, depth),
        "ficoco-v": lambda depth: _blocks(12, depth),
        "mustdrop": lambda depth: {"layers": _at((3, 7, 11, 15), depth, least=2)},
        "pyramiddrop": lambda depth: {"layers": _at((2, 10, 20), depth), "depth": depth.layers},
        "sparsevlm": lambda depth: {"layers": _at((3, 7, 16), depth)},
        "tome": lambda depth: {"blocks": depth.blocks},
    }
)
IN_TOWER = frozenset({"ficoco-v", "tome"})
ENDS_WITH = frozenset({"ficoco-l", "mustdrop"}) | IN_TOWER  # their budget is what they end with
BUDGETLESS = frozenset({"keep-all", "none-kept"})
UNFIT: Mapping[str, str] = MappingProxyType(
    {
        "vla-pruner": "needs the attention of earlier actions (an ActionHistory), which a question has not",
    }
)
