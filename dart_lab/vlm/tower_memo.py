"""A vision tower runs once for each input: asked again for an equal one, it gives back what it gave before.

What lies around the tower runs as usual: the hooks on it, the projector, the way of the features into the prompt. What
methods see inside the tower is kept with its output, for those that come by when it does not run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dart_lab.vlm import compat
from dart_lab.vlm.tap import Captured, Tap

_MEMO = "_dart_lab_tower_memo"
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)  # compared by ==

Show = Callable[[int, Captured, Any], None]


@dataclass(frozen=True, eq=False)
class _Encoding:
    """One run of a tower: copies of its arguments and its output, and what its watched blocks received and gave."""

    tower: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    output: Any
    seen: dict[int, tuple[Captured, Any]]


class TowerMemo:
    """While active, every vision tower of a model answers calls with equal arguments from their first run.

    Arguments and output are kept as copies until the end, so that neither inputs nor features that somebody changes in
    place are mistaken for others. Arguments that are no tensors, plain values or lists and dicts of these always run.

    Args:
        model: a supported Hugging Face model object.
        blocks: blocks of its image tower whose attention and output are kept, for methods that look at them.

    `runs` counts how often a tower ran.

    >>> import dart_lab as dl
    >>> vlm, sample = dl.load("tiny"), dl.load_task("shapes", n=1, seed=0)[0]
    >>> inputs = vlm.prepare([sample.image], [sample.question])
    >>> with TowerMemo(vlm.model) as memo, torch.no_grad():
    ...     first, second = (vlm.model(**inputs).logits for _ in range(2))
    ...     memo.runs, torch.equal(first, second)
    (1, True)
    """

    def __init__(self, model: Any, blocks: Collection[int] = ()) -> None:
        self.runs = 0
        self._towers = compat.vision_towers(model)
        self._blocks = frozenset(blocks)
        self._known: list[_Encoding] = []
        self._watching: frozenset[int] = frozenset()
        self._show: Show | None = None
        self._paused = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> TowerMemo:
        for tower in self._towers:
            self._put(tower, "forward", self._remembering(tower, tower.forward))
            self._put(tower, _MEMO, self)
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()
        self._known.clear()

    def watch(self, blocks: Collection[int], show: Show) -> Callable[[], None]:
        """Call `show(block, captured, output)` for these blocks whenever a tower does not run; returns what ends it."""
        self._watching, self._show = frozenset(blocks), show

        def end() -> None:
            self._watching, self._show = frozenset(), None

        return end

    def pause(self) -> Callable[[], None]:
        """Let the towers run, and remember nothing, for a method that changes them; returns what ends it."""
        self._paused = True

        def end() -> None:
            self._paused = False

        return end

    def _put(self, tower: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of this very tower, and note how to undo it."""
        own = vars(tower)
        had, before = name in own, own.get(name)

        def undo() -> None:
            own.pop(name, None)
            if had:
                own[name] = before

        own[name] = value
        self._undo.append(undo)

    def _remembering(self, tower: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def remember(*args: Any, **kwargs: Any) -> Any:
            if self._paused:
                return forward(*args, **kwargs)
            own = {name: value for name, value in kwargs.items() if name not in compat.DECODER_ARGUMENTS}
            known = self._recall(tower, (args, own))
            if known is None:
                given = _copied((args, own))  # before the run, which may change its arguments
                return self._run(tower, given, lambda: forward(*args, **kwargs))
            if self._show is not None:
                for block in sorted(self._watching):
                    self._show(block, *known.seen[block])
            return _copied(known.output)

        return remember

    def _recall(self, tower: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> _Encoding | None:
        """The run with equal arguments that has seen all that is watched."""
        for known in self._known:
            if known.tower is tower and self._watching <= known.seen.keys() and _equal(known.given, given):
                return known
        return None

    def _run(self, tower: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], forward: Callable[[], Any]) -> Any:
        with self._seeing(tower) as seen:
            output = forward()
        self.runs += 1
        self._known.append(_Encoding(tower, given, _copied(output), seen))
        return output

    @contextmanager
    def _seeing(self, tower: nn.Module) -> Iterator[dict[int, tuple[Captured, Any]]]:
        """Collect what the blocks that are asked for receive and give."""
        seen: dict[int, tuple[Captured, Any]] = {}
        wanted = sorted(self._blocks | self._watching)
        if not wanted:
            yield seen
            return
        blocks, captured = compat.vision_blocks(tower), dict[int, Captured]()

        def keep(block: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if block in captured:
                    seen[block] = (captured[block], _copied(output))

            return hook

        handles = [blocks[block].register_forward_hook(keep(block)) for block in wanted]
        try:
            with Tap({block: blocks[block] for block in wanted}, captured.__setitem__):
                yield seen
        finally:
            for handle in handles:
                handle.remove()


def memo_of(tower: nn.Module) -> TowerMemo | None:
    """The memo that is active on a vision tower, or None."""
    found: TowerMemo | None = vars(tower).get(_MEMO)
    return found


def _copied(value: Any) -> Any:
    """Tensors copied, lists and dicts of any class made anew; everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_copied(part) for part in value)
    if isinstance(value, (list, dict)):
        fresh = copy.copy(value)
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            fresh[key] = _copied(part)
        return fresh
    return value


def _equal(one: Any, other: Any) -> bool:
    """Whether two arguments are of one type and hold the same, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return isinstance(one, _PLAIN) and bool(one == other)
