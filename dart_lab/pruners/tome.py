"""ToMe: merge the most similar tokens of every vision block (Token Merging, arXiv 2210.09461)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.pruners.assignment import in_order
from dart_lab.pruners.base import Pruner, Stage
from dart_lab.pruners.budget import check_choice, check_one_of, resolve_keep
from dart_lab.pruners.matching import bipartite_match, merge_matched, most_merges
from dart_lab.pruners.reduction import PAD, Reduction, compose, gather_tokens
from dart_lab.pruners.signals import Signals
from dart_lab.pruners.staged import Staged, spread

LAST_COLUMN = 1 << 20  # more columns than any grid has
Order = Literal["raster", "tome"]


@dataclass(frozen=True, kw_only=True)
class ToMe(Staged):
    """Token Merging in the vision tower: every block merges away r of its tokens, between attention and MLP.

    Args:
        keep: patches to end with, or retention ratio; the blocks share what goes, the first ones taking the remainder.
            Leave out if `r` is given.
        blocks: vision blocks that the features pass through. Default 23: LLaVA-1.5 takes the features of the last but
            one of 24, so the last block must not count.
        r: tokens to merge away in every block, or one number a block.
        order: of the tokens that leave the last block: "raster" (default; each in the place of the token that
            represents it) or "tome" (unmerged even ones, then all odd ones, block after block).

    Merged tokens are means weighted by size; `sizes` go on to the next block, whose attention adds log size to its
    logits. A block cannot merge away more than half of its tokens; a budget that needs more is refused.

    >>> [part.stage.layer for part in ToMe(keep=4, blocks=3).parts()]
    [0, 1, 2]

    Differs from the official code in: equal similarities go to the lower index; raster order at the end, as a language
    model needs; the number of patches can be asked for. The class token is protected, as there.
    """

    name: ClassVar[str] = "tome"
    paper: ClassVar[str] = "Token Merging: Your ViT But Faster, arXiv 2210.09461"
    keeps_cls: ClassVar[bool] = True
    positions: ClassVar[Literal["compact"]] = "compact"

    blocks: int = 23
    r: int | tuple[int, ...] | None = None
    order: Order = "raster"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(self.name, keep=self.keep, r=self.r)
        check_choice(self.name, "order", self.order, get_args(Order))
        check_whole("tome: blocks", self.blocks, least=1, hint="it counts vision blocks")
        rs = self.r if isinstance(self.r, tuple) else (self.r or 0,)
        if len(rs) > self.blocks or any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in rs):
            raise DartLabError(f"tome: r={self.r!r}: give a whole number ≥ 0, or one a block, at most {self.blocks}")

    def _needs_keep(self) -> bool:
        return self.r is None

    def parts(self) -> tuple[Pruner, ...]:
        """One step a block."""
        rs: tuple[int | None, ...] = (None,) * self.blocks
        if self.r is not None:
            given = self.r if isinstance(self.r, tuple) else (self.r,) * self.blocks
            rs = given + (0,) * (self.blocks - len(given))
        return tuple(
            ToMeBlock(
                keep=self.keep, block=b, blocks=self.blocks, r=rs[b],
                order="tome" if b < self.blocks - 1 else self.order,
            )
            for b in range(self.blocks)
        )


@dataclass(frozen=True, kw_only=True)
class ToMeBlock(Pruner):
    """One block's step of `ToMe`: block `block` of `blocks` (0-based) merges towards `keep`, or merges `r` away.

    >>> keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [1.0, 1.0]])[None, None]
    >>> signals = Signals.of(visual=torch.arange(4)[None], keys=keys)
    >>> ToMeBlock(r=1, block=0, blocks=1)(signals).sizes
    tensor([[1., 2., 1.]])
    """

    name: ClassVar[str] = "tome-block"
    needs: ClassVar[frozenset[str]] = frozenset({"keys", "sizes"})
    keeps_cls: ClassVar[bool] = True
    proportional: ClassVar[bool] = True
    positions: ClassVar[Literal["compact"]] = "compact"

    block: int
    blocks: int
    r: int | None = None
    order: Order = "tome"

    def _needs_keep(self) -> bool:
        return self.r is None

    @property
    def stage(self) -> Stage:
        """Inside its vision block."""
        return Stage("VIT_BLOCK", self.block)

    def asked(self, signals: Signals) -> Tensor:
        """`(batch,)` int64: tokens that leave the block, class token included."""
        counts, special = signals.counts, class_mask(signals).sum(dim=1)
        limit = most_merges(counts, class_mask(signals))
        if self.r is not None:
            return counts - limit.clamp(max=self.r)
        wanted = special + self._schedule(signals.before - special)
        return counts - (counts - wanted).clamp(min=0).minimum(limit)

    def _schedule(self, patches: Tensor) -> Tensor:
        """`(batch,)` patches that should be left after this block, of `patches` before the first."""
        goal = resolve_keep(1.0 if self.keep is None else self.keep, patches)
        if bool((patches > goal << self.blocks).any()):
            raise DartLabError(
                f"tome: keep={self.keep} of {int(patches.max())} patches is out of reach: a block merges away half at "
                f"most, and there are {self.blocks} blocks; raise keep or blocks"
            )
        even = torch.stack([
            n - sum(spread(n - m, self.blocks)[: self.block + 1]) for n, m in zip(patches, goal, strict=True)
        ])
        return even.minimum(goal << (self.blocks - 1 - self.block))  # later blocks can still halve it down to the goal

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Match by the block's keys, mean over heads, and merge."""
        counts = signals.counts
        match = bipartite_match(head_mean_keys(signals), counts - asked, signals.valid, class_mask(signals))
        merged = merge_matched(match, counts, sizes=token_sizes(signals))
        return in_order(merged, raster(signals)) if self.order == "raster" else merged


@dataclass(frozen=True, kw_only=True)
class ToMeLLM(Pruner):
    """Token Merging of the visual tokens in the language model, before decoder layer `layer`.

    Rounds of bipartite matching on the keys of layer K−1, each halving the tokens at most, until `keep` are left. A
    merged token takes the place of the token that represents it.

    >>> keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [1.0, 1.0]])[None, None]
    >>> ToMeLLM(keep=1)(Signals.of(visual=torch.arange(4)[None], keys=keys)).sizes
    tensor([[4.]])

    Differs from the official code in: there is none for language models; ports that merge in every layer, or in rounds
    of another size, give other sets at the same budget.
    """

    name: ClassVar[str] = "tome-llm"
    needs: ClassVar[frozenset[str]] = frozenset({"keys"})

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Match, merge keys along with sizes, and match again."""
        metric, counts, sizes = head_mean_keys(signals), signals.counts, None
        whole: Reduction | None = None
        while whole is None or bool((whole.counts > asked).any()):
            valid = torch.arange(metric.shape[1], device=counts.device) < counts[:, None]
            step = merge_matched(bipartite_match(metric, counts - asked, valid), counts, sizes=sizes)
            metric, counts, sizes = step.apply(metric), step.counts, step.slot_sizes()
            whole = step if whole is None else compose(step, whole)
        index = torch.arange(signals.visual.shape[1], device=counts.device).expand_as(signals.visual)
        return in_order(whole, index)


def class_mask(signals: Signals) -> Tensor:
    """`(batch, n)` bool: the class token, where there is one."""
    if signals.cls is None:
        return torch.zeros_like(signals.valid)
    return (signals.visual == signals.cls[:, None]) & signals.valid


def head_mean_keys(signals: Signals) -> Tensor:
    """`(batch, n, head_dim)` float32: keys of the visual tokens, mean over heads."""
    return gather_tokens(signals.get("keys").float().mean(dim=1), signals.visual)


def token_sizes(signals: Signals) -> Tensor | None:
    """`(batch, n)`: patches that each visual token stands for; None where the stage does not know."""
    if "sizes" not in signals.providers:
        return None
    return signals.get("sizes").gather(1, signals.visual.clamp(min=0))


def raster(signals: Signals) -> Tensor:
    """`(batch, n)` int64 key that sorts by row, then column, tokens off the grid first; by index without a grid."""
    if signals.grid is None:
        return torch.arange(signals.visual.shape[1], device=signals.visual.device).expand_as(signals.visual)
    row, column = signals.grid[..., 2], signals.grid[..., 3]
    return torch.where(row == PAD, PAD, row * LAST_COLUMN + column)
