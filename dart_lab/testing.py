"""The contract of a pruning method, as a check that anybody can run on their own.

>>> from dart_lab.pruners import Random
>>> check_pruner(Random, keep=4)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.pruners.base import Pruner, ScorePruner
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.pruners.selectors import ascending, top_k
from dart_lab.pruners.signals import Signals

CHANNELS, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 8  # of the synthetic model

STATES = ("hidden", "normed", "embeds", "delta")  # (sequence, channels)
BY_HEAD = ("keys", "values")  # (kv_heads, sequence, head_dim)
BY_TOKEN = ("received", "sizes", "relevance", "survives")  # (sequence,)
MAPS = ("attention", "attention_logits", "attention_ahead")  # (heads, sequence, sequence); also attention@L
PADDING_VALUE = 3.0  # what padding holds: it must not matter
IN_THE_TOWER = ("VIT_BLOCK", "VISION_OUT")


@dataclass(frozen=True)
class Sample:
    """A prompt to be made up: text, then grids of visual tokens with text between, then the question.

    `crops`: the grids are views of one image, not images; `newlines`: a token off the grid ends each of their rows.
    """

    grids: tuple[tuple[int, int], ...]
    before: int = 3
    between: int = 2
    after: int = 4
    newlines: bool = False
    crops: bool = False


LAYOUTS: tuple[tuple[str, tuple[Sample, ...]], ...] = (
    ("one image", (Sample(((4, 6),)),)),
    ("two images with text between", (Sample(((3, 4), (4, 4))),)),
    ("grid with newline tokens", (Sample(((4, 5),), newlines=True),)),
    ("a view of the whole and unlike tiles", (
        Sample(((4, 4), (2, 3), (3, 4)), between=0, newlines=True, crops=True),
    )),
    ("frames of a video", (Sample(((2, 4), (2, 4), (2, 4)), between=0),)),
    ("a grid that is no square", (Sample(((3, 6),)),)),
    ("empty question", (Sample(((4, 4),), after=0),)),
    ("a single visual token", (Sample(((1, 1),)),)),
    ("batch of different sizes, left padded", (
        Sample(((4, 6),)), Sample(((3, 4),), before=1, after=2), Sample(((2, 4), (3, 3)), after=7),
    )),
)


def check_pruner(pruner: Pruner | type[Pruner], **parameters: Any) -> None:
    """Hold a pruning method against the contract, on synthetic signals.

    Several layouts (one image, two images, newlines, tiles, frames, no question, one token, a padded batch) and budgets
    are decided and the decisions looked at: kept sets sorted, unique, inside the image, text untouched, budget exact;
    ties by the lower index; nothing kept between calls, nothing drawn from global generators; a sample decided alone as
    in a batch; heads interchangeable; only declared signals asked for, and inputs left as they were. A budget that the
    method's `asked` refuses is passed over.

    Args:
        pruner: a method, or its class, which is then built with `parameters`. A method with several stages is checked
            stage by stage.
        parameters: the fields of the class, such as `keep=4`. Where `keep` is given, further budgets are tried too.

    Raises:
        DartLabError: the first fault, in one line.
    """
    method = pruner(**parameters) if isinstance(pruner, type) else dataclasses.replace(pruner, **parameters)
    _check_class(method)
    parts = method.parts()
    if parts != (method,):
        for part in parts:
            check_pruner(part)
        return
    tried = False
    for layout, samples in _layouts(method):
        for variant in _variants(method, samples):
            bench = _Bench(variant, layout, tuple(_row(method, sample, i) for i, sample in enumerate(samples)))
            if bench.feasible():
                tried = True
                decided = _check_decision(bench)
                _check_repeats(bench, decided, tuple(_row(method, sample, 100 + i) for i, sample in enumerate(samples)))
                _check_ties(bench, tuple(_row(method, sample, i, constant=True) for i, sample in enumerate(samples)))
                _check_batch(bench, decided)
                _check_heads(bench, decided)
    if not tried:
        raise DartLabError(f"{method.name}: refuses every layout and budget; see what calling it on one of them says")


def _check_class(method: Pruner) -> None:
    kind = type(method)
    if not isinstance(method, Pruner):
        raise DartLabError(f"{kind.__name__} is not a Pruner; subclass dart_lab.pruners.Pruner or ScorePruner")
    if inspect.isabstract(kind) or not isinstance(getattr(method, "name", None), str):
        raise DartLabError(f"{kind.__name__} needs a name: set `name: ClassVar[str]`")
    if "__dataclass_fields__" not in vars(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise DartLabError(f"{method.name}: not a frozen dataclass; write @dataclass(frozen=True, kw_only=True)")
    needs = getattr(method, "needs", None)
    if not isinstance(needs, frozenset):
        raise DartLabError(f"{method.name}: needs is {needs!r}; declare the signals it asks for as a frozenset")
    for signal in needs:
        if signal not in _known() and not signal.startswith("attention@"):
            raise DartLabError(f"{method.name}: needs the unknown signal {signal!r}. {did_you_mean(signal, _known())}")


def _known() -> tuple[str, ...]:
    return STATES + BY_HEAD + BY_TOKEN + MAPS


def _layouts(method: Pruner) -> Iterator[tuple[str, tuple[Sample, ...]]]:
    """The layouts that exist at the method's stage: in tower and projector a sample is one crop, without text."""
    for layout, samples in LAYOUTS:
        if method.stage.kind in (*IN_THE_TOWER, "PROJECTED"):
            if any(sample.newlines for sample in samples) or layout == "empty question":
                continue
            tower = int(method.stage.kind in IN_THE_TOWER)  # its class token stands before the patches
            samples = tuple(Sample(sample.grids[:1], before=tower, after=0) for sample in samples)
        yield layout, samples


def _variants(method: Pruner, samples: tuple[Sample, ...]) -> Iterator[Pruner]:
    """The method with several budgets, or as it is where no `keep` is given."""
    if method.keep is None:
        yield method
        return
    n = min(sum(rows * columns for rows, columns in sample.grids) for sample in samples)
    half = max(1, n // 2)
    budgets = (half, 0.5, 1.0) if len(samples) > 1 else (1, half, n) if samples == LAYOUTS[0][1] else (half, 1.0)
    for keep in budgets:
        yield dataclasses.replace(method, keep=keep)


@dataclass(frozen=True)
class _Bench:
    """A method before a layout: asks for decisions and words the faults."""

    method: Pruner
    layout: str
    rows: tuple[_Row, ...]

    def fault(self, text: str) -> DartLabError:
        keep = "" if self.method.keep is None else f", keep={self.method.keep}"
        return DartLabError(f"{self.method.name}: {text} (layout: {self.layout}{keep})")

    def feasible(self) -> bool:
        """False where a budget is refused with a reason: that is the record of why not."""
        signals = _signals(self.method, self.rows)
        try:
            self.method.asked(signals)
            if self.method.budget != "exact":
                self.method(signals)
        except DartLabError:
            return False
        except Exception as error:
            raise self.crash(error) from error
        return True

    def crash(self, error: Exception) -> DartLabError:
        return self.fault(f"raised {type(error).__name__}: {' '.join(str(error).split())}")

    def decide(self, rows: tuple[_Row, ...], tensors: Mapping[str, Tensor] | None = None) -> Reduction:
        signals = _signals(self.method, rows, tensors)
        asked: set[str] = set()
        providers = {name: _noting(asked, name, provide) for name, provide in signals.providers.items()}
        generator = torch.get_rng_state()
        try:
            reduction = self.method(dataclasses.replace(signals, providers=providers))
        except DartLabError as error:
            raise self.fault(str(error).removeprefix(f"{self.method.name}: ")) from error
        except Exception as error:
            raise self.crash(error) from error
        if asked - self.method.needs:
            raise self.fault(f"asks for the signal {min(asked - self.method.needs)!r} without declaring it in needs")
        if not torch.equal(generator, torch.get_rng_state()):
            raise self.fault("draws from torch's global generator; use signals.generator(sample, seed)")
        return reduction


def _check_decision(bench: _Bench) -> Reduction:
    """One decision: sorted, unique, in span, as many as promised, order and score consistent, inputs unchanged."""
    signals, tensors = _signals(bench.method, bench.rows), _stacked(bench.rows)
    untouched = {name: tensor.clone() for name, tensor in tensors.items()}
    reduction = bench.decide(bench.rows, tensors)
    try:
        reduction.check(size=signals.counts, method=bench.method.name)
    except DartLabError as error:
        raise bench.fault(str(error).removeprefix(f"{bench.method.name}: ")) from error
    for name, before in untouched.items():
        if not torch.equal(tensors[name], before):
            raise bench.fault(f"modifies its input {name!r}; work on a copy")
    short = (reduction.asked != PAD) & (reduction.asked != reduction.counts)
    if bench.method.budget == "exact" and bool(short.any()):
        raise bench.fault(f"wrong count: kept {reduction.counts.tolist()}, asked for {reduction.asked.tolist()}")
    if reduction.order is not None and not torch.equal(ascending(reduction.order), reduction.keep):
        raise bench.fault("order does not hold the kept tokens; return the same indices in the order of choice")
    if reduction.score is not None and reduction.score.shape != signals.visual.shape:
        raise bench.fault(f"score has shape {tuple(reduction.score.shape)}, expected {tuple(signals.visual.shape)}")
    return reduction


def _check_repeats(bench: _Bench, decided: Reduction, other: tuple[_Row, ...]) -> None:
    """The same input gives the same set, at once and after another input."""
    again = bench.decide(bench.rows)
    bench.decide(other)
    if not torch.equal(decided.keep, again.keep) or not torch.equal(decided.keep, bench.decide(bench.rows).keep):
        raise bench.fault("decides the same input differently at a later call: state kept between calls, or chance")


def _check_ties(bench: _Bench, alike: tuple[_Row, ...]) -> None:
    """Where all tokens are alike, the choice is the same at every call, and a ranking keeps the lower indices."""
    first, second = bench.decide(alike), bench.decide(alike)
    if not torch.equal(first.keep, second.keep):
        raise bench.fault("breaks ties by chance: of equal tokens, others are chosen from call to call")
    if isinstance(bench.method, ScorePruner) and first.score is not None and first.merge is None:
        valid = _signals(bench.method, alike).valid
        expected = ascending(top_k(first.score.masked_fill(~valid, 0.0), first.counts, valid))
        if not torch.equal(expected, first.keep):
            raise bench.fault("breaks ties against the rule: of equal scores the lower index stays")


def _check_batch(bench: _Bench, decided: Reduction) -> None:
    """Every sample is decided in the batch, whatever stands beside it, as it is alone."""
    for i, row in enumerate(bench.rows if len(bench.rows) > 1 else ()):
        alone = bench.decide((row,)).keep[0].tolist()
        together = decided.keep[i, : int(decided.counts[i])].tolist()
        if together != alone:
            raise bench.fault(f"batch leak: sample {i} alone keeps {alone}, in a batch {together}")


def _check_heads(bench: _Bench, decided: Reduction) -> None:
    """The order of attention heads means nothing. (The sums of synthetic numbers are exact in any order.)"""
    mixed = tuple(row.with_heads_reversed() for row in bench.rows)
    if not torch.equal(bench.decide(mixed).keep, decided.keep):
        raise bench.fault("depends on the order of attention heads")


@dataclass(frozen=True)
class _Row:
    """One sample's positions and tensors, without a batch axis."""

    length: int
    visual: tuple[int, ...]
    grid: tuple[tuple[int, int, int, int], ...]
    tensors: dict[str, Tensor]
    seed: int

    def with_heads_reversed(self) -> _Row:
        by_head = [name for name in self.tensors if name in BY_HEAD or name.startswith("attention")]
        return dataclasses.replace(self, tensors=self.tensors | {name: self.tensors[name].flip(0) for name in by_head})


def _row(method: Pruner, sample: Sample, seed: int, *, constant: bool = False) -> _Row:
    """Make a sample up. Numbers are multiples of 1/64, so that sums do not depend on their order."""
    visual: list[int] = []
    grid: list[tuple[int, int, int, int]] = []
    position = sample.before
    for image, (rows, columns) in enumerate(sample.grids):
        view = (0, image) if sample.crops else (image, 0)
        for row in range(rows):
            cells = [(*view, row, column) for column in range(columns)]
            cells += [(*view, -1, -1)] if sample.newlines else []
            visual += range(position, position + len(cells))
            grid += cells
            position += len(cells)
        position += sample.between if image + 1 < len(sample.grids) else 0
    if method.stage.kind in IN_THE_TOWER and getattr(method, "keeps_cls", False):
        visual, grid = [0, *visual], [(0, 0, -1, -1), *grid]
    length = position + sample.after
    generator = torch.Generator().manual_seed(seed)
    names = sorted({*_known(), *(name for name in method.needs if name.startswith("attention@"))})
    tensors = {name: _tensor(name, length, generator, constant) for name in names}
    if method.stage.kind not in (*IN_THE_TOWER, "PROJECTED"):
        tensors |= {name: t.tril() for name, t in tensors.items() if name.startswith("attention")}
    tensors["received"] = tensors["attention"].sum(dim=1).mean(dim=0)
    return _Row(length, tuple(visual), tuple(grid), tensors, seed)


def _tensor(name: str, length: int, generator: torch.Generator, constant: bool) -> Tensor:
    def numbers(low: int, *shape: int) -> Tensor:
        return torch.full(shape, 1.0) if constant else torch.randint(low, 128, shape, generator=generator).float() / 64

    if name in STATES:
        return numbers(-128, length, CHANNELS)
    if name in BY_HEAD:
        return numbers(-128, KV_HEADS, length, HEAD_DIM)
    if name == "sizes":
        return torch.ones(length)
    return numbers(1, length) if name in BY_TOKEN else numbers(1, HEADS, length, length) / 64


def _stacked(rows: tuple[_Row, ...]) -> dict[str, Tensor]:
    """The samples' tensors with a batch axis, padded on the left with numbers that must not matter."""
    length = max(row.length for row in rows)
    return {name: torch.stack([_left_padded(name, row, length) for row in rows]) for name in rows[0].tensors}


def _signals(method: Pruner, rows: tuple[_Row, ...], tensors: Mapping[str, Tensor] | None = None) -> Signals:
    """Put samples into a batch."""
    length, n = max(row.length for row in rows), max(len(row.visual) for row in rows)
    visual = torch.full((len(rows), n), PAD)
    grid = torch.full((len(rows), n, 4), -1)
    attended = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        shift = length - row.length
        visual[i, : len(row.visual)] = torch.tensor(row.visual) + shift
        grid[i, : len(row.visual)] = torch.tensor(row.grid)
        attended[i, shift:] = True
    first = attended.long().argmax(dim=1)
    return Signals.of(
        visual=visual, attended=attended, grid=grid, sample_seeds=tuple(row.seed for row in rows),
        class_token=first if method.stage.kind in IN_THE_TOWER else None,
        **(_stacked(rows) if tensors is None else tensors),
    )


def _left_padded(name: str, row: _Row, length: int) -> Tensor:
    tensor, shift = row.tensors[name], length - row.length
    if not shift:
        return tensor
    if name.startswith("attention"):
        return torch.nn.functional.pad(tensor, (shift, 0, shift, 0))
    return torch.nn.functional.pad(tensor, (shift, 0) if name in BY_TOKEN else (0, 0, shift, 0), value=PADDING_VALUE)


def _noting(asked: set[str], name: str, provide: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def noted(*arguments: Any) -> Tensor:
        asked.add(name)
        return provide(*arguments)

    return noted
