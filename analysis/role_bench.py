"""What the figures about roles share: a model with a rolebook, roles of every sample, answers under conditions."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dart_lab.displays.figure import FigureOptions
from dart_lab.errors import DartLabError
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.divprune import DivPrune
from dart_lab.pruners.fitting import Depth, fit
from dart_lab.roles.controls import Match, matched_control
from dart_lab.roles.fit import fit_rolebook
from dart_lab.roles.labels import ROLES, TokenRoles
from dart_lab.roles.pool import Pool, Survey, open_pool
from dart_lab.roles.rolebook import Rolebook, load_rolebook
from dart_lab.studies.answering import record_of
from dart_lab.tasks.base import Sample
from dart_lab.vlm.layout import VisualTokens

from .sweep import Bench, open_bench

POOL = 96  # pictures on which a rolebook is fitted where none is given
CONTROL_SEEDS = 5  # draws of random tokens for every picture; each picture has its own
POOL_SEED = 1_000_003  # added to the seed: the pool shares no picture with the questions

Conditions = Callable[[Sequence[TokenRoles], Sequence[VisualTokens], Sequence[int]], Mapping[str, Pruner | None]]


@dataclass(frozen=True, eq=False)
class RoleBench:
    """A bench and the rolebook of its model.

    Attributes:
        shares: share of each role among the tokens of a pool, by the rules that are used here.
    """

    bench: Bench
    book: Rolebook
    shares: Mapping[str, float]

    @property
    def present(self) -> list[str]:
        """Roles that the pool has, in order of precedence."""
        return [role for role in ROLES if self.shares[role] > 0]

    def facts(self, name: str) -> dict[str, Any]:
        """Those of the bench, and what the rolebook says."""
        rules, book = self.bench.options.rules, self.book.lines()
        if rules:
            book.append(
                "but here roles by " + ", ".join(f"{role}={rule}" for role, rule in rules.items()) + ": "
                + ", ".join(f"{role} {100 * share:.1f} %" for role, share in self.shares.items()) + " of the pool"
            )  # fmt: skip
        return {**self.bench.facts(name), "roles": self.present, "prevalence": dict(self.book.prevalence), "book": book,
                "pool_shares": dict(self.shares)}  # fmt: skip

    def roles(self, inputs: Mapping[str, Any]) -> list[TokenRoles]:
        """Roles of a batch, from an unpruned run."""
        return self.book.assign(self.bench.vlm, inputs, definition=self.bench.options.rules)

    def answers(self, conditions: Conditions, progress: bool) -> pd.DataFrame:
        """Records of conditions that may differ from sample to sample, with `kept ROLE` and `all ROLE` in each row.

        Args:
            conditions: roles of a batch, its visual tokens, and the samples' numbers → name → method.
            progress: show a progress bar on stderr.
        """
        from tqdm import tqdm

        from dart_lab.studies.branch import branch
        from dart_lab.vlm.locate import layout

        bench, rows = self.bench, list[dict[str, Any]]()
        size = bench.options.batch_size
        for start in tqdm(range(0, len(bench.task), size), desc="questions", unit="batch", disable=not progress):
            batch: list[Sample] = bench.task[start : start + size]
            inputs = bench.vlm.prepare([s.image for s in batch], [s.question for s in batch])
            roles = self.roles(inputs)
            wanted = conditions(roles, layout(bench.vlm, inputs).samples, range(start, start + len(batch)))
            found = branch(bench.vlm, inputs, list(wanted.values()))
            for name, one in zip(wanted, found, strict=True):
                texts = bench.vlm.words(one.tokens)
                for number, (sample, text, own) in enumerate(zip(batch, texts, roles, strict=True)):
                    kept = np.zeros(own.tokens, dtype=bool)
                    kept[one.run.kept[number]] = True
                    counts = {f"kept {role}": int((own[role] & kept).sum()) for role in ROLES}
                    whole = {f"all {role}": int(own[role].sum()) for role in ROLES}
                    record = record_of(sample, name, text, one, number, bench.vlm.depth)
                    rows.append({**record, **counts, **whole})
        return pd.DataFrame(rows)


def open_roles(
    options: FigureOptions, *, n: int, keep: Sequence[int] = (), methods: Sequence[str] | None = None, progress: bool
) -> RoleBench:
    """Open a bench, and its rolebook: the one that was named, or one fitted on pictures of the same data.

    Raises:
        DartLabError: as `open_bench`, or a rolebook of another model.
    """
    bench = open_bench(options, n=n, keep=keep, methods=methods)
    if options.rolebook is not None:
        book = load_rolebook(options.rolebook, bench.vlm)
    else:
        with tempfile.TemporaryDirectory() as folder:
            book = fit_rolebook(
                bench.vlm, pool_of(bench), Path(folder) / "book", seed=options.seed, batch=options.batch_size,
                progress=progress,
            )  # fmt: skip
    shares = {role: book.prevalence[role]["value"] for role in ROLES}
    return RoleBench(bench, book, shares if not options.rules else shares_of(bench, book))


def shares_of(bench: Bench, book: Rolebook) -> dict[str, float]:
    """Share of each role among the tokens of a pool, by the rules of a bench."""
    pool, size, primary = pool_of(bench), bench.options.batch_size, list[np.ndarray]()
    for start in range(0, len(pool), size):
        pictures = [pool[number] for number in range(start, min(start + size, len(pool)))]
        inputs = bench.vlm.prepare(pictures, [Survey.question] * len(pictures))
        primary += [own.primary for own in book.assign(bench.vlm, inputs, definition=bench.options.rules)]
    counts = np.bincount(np.concatenate(primary), minlength=len(ROLES))
    return dict(zip(ROLES, (counts / counts.sum()).tolist(), strict=True))


def pool_of(bench: Bench, n: int = POOL, seed: int = POOL_SEED) -> Pool:
    """Pictures of the data of a bench that none of its questions is about; of a folder, the questions' own pictures."""
    o = bench.options
    if o.data in (None, "shapes"):
        return open_pool("shapes", n=n, seed=o.seed + seed)
    if len(bench.task) < 2:
        raise DartLabError("roles are compared between pictures; give 2 questions or more")
    return Pool(bench.task.name, len(bench.task), lambda number: bench.task[number].image, bench.task.provenance())


def before_layer(name: str, *, keep: int, depth: Depth, layer: int, seed: int) -> Pruner:
    """A method that cuts before decoder layer `layer`: DivPrune too, which acts earlier by default (as 2608.04483)."""
    pruner = fit(name, keep=keep, depth=depth, layer=layer, seed=seed)
    return dataclasses.replace(pruner, where="LLM_LAYER", layer=layer) if isinstance(pruner, DivPrune) else pruner


def masks(each: Sequence[np.ndarray]) -> Tensor:
    """One mask a sample `(n,)` as `(batch, n)` bool, shorter ones padded."""
    width = max(len(mask) for mask in each)
    return torch.stack([torch.from_numpy(np.pad(mask, (0, width - len(mask)))) for mask in each])


def controls(
    roles: Sequence[TokenRoles], tokens: Sequence[VisualTokens], numbers: Sequence[int], role: str, *, match: Match,
    seed: int, others_only: bool,
) -> Tensor:  # fmt: skip
    """`(batch, n)`: as many random tokens as each sample has of a role, the same whatever the batch."""
    return masks(
        [
            matched_control(
                own[role], among=~own[role] if others_only else None, match=match, row=place.row,
                seed=int(np.random.SeedSequence((seed, number)).generate_state(1)[0]),
            )
            for own, place, number in zip(roles, tokens, numbers, strict=True)
        ]
    )  # fmt: skip


def averaged(records: pd.DataFrame, groups: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Records in which several conditions are one: the mean of `correct` and of what was kept, sample by sample.

    Args:
        records: as `RoleBench.answers` gives them.
        groups: new name → the conditions that it stands for; other conditions stay as they are.
    """
    inside = {name for members in groups.values() for name in members}
    parts = [records[~records["condition"].isin(inside)]]
    numbers = ["correct", "got", *(c for c in records.columns if c.startswith(("kept ", "all ")))]
    same = ["sample", "image_id", "family"]
    for name, members in groups.items():
        part = records[records["condition"].isin(members)]
        parts.append(part.groupby(same, sort=False)[numbers].mean().reset_index().assign(condition=name))
    return pd.concat(parts, ignore_index=True)
