"""The page that lists all methods: `python -m dart_lab.pruners.catalogue > docs/methods.md`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.counting import made_up
from dart_lab.pruners.registry import BUILT_IN, pruner_class

VISUAL, TEXT, KEEP = 36, 5, 9  # tokens of the prompt on which a method shows what it does


@dataclass(frozen=True)
class Original:
    """The licence of the code that the authors released, and the golden cases made with it, by folder."""

    licence: str
    golden: tuple[str, ...] = ()


NO_CODE, NO_LICENCE = Original("no code released"), "no licence stated"
ORIGINALS: Mapping[str, Original] = MappingProxyType({
    "alpha": NO_CODE,
    "cdpruner": Original("Apache-2.0"),
    "dart": Original("Apache-2.0", ("dart", "epic_dart", "lightcompress_dart", "e2e_dart", "e2e_dart_qwen25vl")),
    "divprune": Original("CC BY-NC 4.0", ("divprune", "lightcompress_divprune")),
    "elastic-cache": Original("MIT"),
    "fastervlm": Original("Apache-2.0", ("fastervlm",)),
    "fastv": Original(NO_LICENCE, ("fastv", "epic_fastv", "e2e_fastv")),
    "fastv-vis": NO_CODE,
    "ficoco-l": Original(NO_LICENCE, ("ficoco_l",)),
    "ficoco-v": Original(NO_LICENCE, ("ficoco_v",)),
    "hired": Original("MIT", ("hired",)),
    "mustdrop": Original("Apache-2.0", ("mustdrop",)),
    "prumerge": Original("Apache-2.0"),
    "pyramiddrop": Original("MIT", ("e2e_pdrop",)),
    "random": Original("Apache-2.0 (EPIC)", ("epic_random",)),
    "scope": Original(NO_LICENCE),
    "sparsevlm": Original("Apache-2.0", ("sparsevlm", "e2e_sparsevlm")),
    "tome": Original("CC BY-NC 4.0", ("tome",)),
    "uniqueness": NO_CODE,
    "v2drop": Original("Apache-2.0"),
    "visionzip": Original("Apache-2.0", ("visionzip",)),
    "vispruner": Original("Apache-2.0", ("vispruner",)),
    "vla-pruner": Original("MIT"),
    "window-fastv": NO_CODE,
})

_HEAD = """# Methods

Written by `python -m dart_lab.pruners.catalogue > docs/methods.md` from the methods themselves: edit them, not this.

No method switches the model's attention backend. What a method reads of the attention is recomputed from queries and
keys: "1 row" is one query's, "rows" are those of some queries, "every row" is as many as there are visual tokens,
"column sums" are what each token receives from all. So all of them run beside FlashAttention, except where the column
says "biased": there, merged tokens add the logarithm of their size to the logits of the vision blocks after them.

Layers are 0-based; K is the parameter `layer`, and a method at K looks at layer K−1. Parity names the folders of golden
cases, made with the authors' code, that the method reproduces (`pytest tests/golden --golden DIR -k FOLDER`).
Methods are written from descriptions; no line is taken from the originals.

| method | acts | signals | attention | tokens | positions | paper | original's licence | parity |
|---|---|---|---|---|---|---|---|---|
"""

_PLACES = MappingProxyType({
    "VIT_BLOCK": "inside vision block",
    "VISION_OUT": "on the vision tower's output",
    "PROJECTED": "on the projector's output",
    "LLM_IN": "before the language model",
    "LLM_LAYER": "before decoder layer",
    "POST_PREFILL_CACHE": "in the KV cache",
})


def catalogue() -> str:
    """The page as Markdown, one row a built-in method.

    >>> catalogue().startswith("# Methods")
    True
    """
    return _HEAD + "".join(f"| {' | '.join(_row(name))} |\n" for name in sorted(BUILT_IN))


def example(name: str) -> Pruner:
    """A method with its default parameters, and a budget if it takes one."""
    try:
        return pruner_class(name)(keep=KEEP)
    except DartLabError:  # it decides itself how many stay
        return pruner_class(name)()


def _row(name: str) -> tuple[str, ...]:
    method = example(name)
    parts, needs = method.parts(), sorted(method.needs)
    seen = [watch(part) for part in parts]
    original = ORIGINALS.get(name, Original("–"))
    return (
        f"`{name}` ({type(method).__name__})", acts(parts), ", ".join(needs) or "none",
        _attention(method, seen), "merges" if any(part.merges for part in seen) else "drops",
        method.positions, method.paper or "–", original.licence, ", ".join(original.golden) or "–",
    )


def acts(parts: tuple[Pruner, ...]) -> str:
    """Where the parts of a method act, in words.

    >>> acts((example("fastv"),))
    'before decoder layer K = 2'
    """
    places: dict[str, list[int]] = {}
    for part in parts:
        places.setdefault(part.stage.kind, []).append(part.stage.layer)
    words = []
    for kind, layers in places.items():
        if kind not in ("VIT_BLOCK", "LLM_LAYER"):
            words.append(_PLACES[kind])
        elif len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
            words.append(f"{_PLACES[kind]}s {layers[0]} to {layers[-1]}")
        elif kind == "LLM_LAYER" and len(parts) == 1:
            words.append(f"{_PLACES[kind]} K = {layers[0]}")
        else:
            words.append(f"{_PLACES[kind]}{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}")
    return "; ".join(words)


@dataclass(frozen=True)
class Seen:
    """What a method did: the most attention rows it asked for at once, whether it asked for sums, and merged."""

    rows: int
    sums: bool
    merges: bool


def watch(part: Pruner) -> Seen:
    """Let a single-stage method decide on a made-up prompt.

    >>> watch(example("fastv"))
    Seen(rows=1, sums=False, merges=False)
    """
    tower = part.stage.kind in ("VIT_BLOCK", "VISION_OUT")
    signals = made_up(
        part, VISUAL, original=VISUAL, text=0 if tower or part.stage.kind == "PROJECTED" else TEXT, before=int(tower),
        class_is_visual=tower and part.keeps_cls,
    )
    rows, names = [0], set[str]()

    def noting(name: str, provide: Callable[..., Tensor], *queries: Tensor) -> Tensor:
        names.add(name)
        rows.extend(query.shape[1] for query in queries)
        return provide(*queries)

    providers = {name: partial(noting, name, provide) for name, provide in signals.providers.items()}
    reduction = part(dataclasses.replace(signals, providers=providers))
    return Seen(max(rows), "received" in names, reduction.merge is not None)


def _attention(method: Pruner, seen: list[Seen]) -> str:
    rows = max(part.rows for part in seen)
    read = "every row" if rows >= VISUAL else "rows" if rows > 1 else "1 row" if rows else "none"
    if any(part.sums for part in seen):
        read = "column sums"
    elif "received" in method.needs:
        read += " (column sums if there is no class token)"
    return f"{read}, biased" if "sizes" in method.needs else read


if __name__ == "__main__":
    sys.stdout.write(catalogue())
