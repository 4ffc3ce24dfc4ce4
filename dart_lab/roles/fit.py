"""`fit_rolebook`: from a pool of pictures to a rolebook. Definitions: docs/roles.md; every number is a parameter."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dart_lab.errors import DartLabError, check_whole
from dart_lab.files import check_targets, check_writable
from dart_lab.roles.clusters import (
    SAME_VECTOR,
    Clusters,
    by_silhouette,
    dense_clusters,
    nearest_centroid,
    spherical_kmeans,
)
from dart_lab.roles.histogram import Histogram
from dart_lab.roles.identity import identity_of
from dart_lab.roles.labels import ALIVE, DEAD, LLM_SINK, ROLES, VIT_SINK, kappa
from dart_lab.roles.lens import nearest_ids
from dart_lab.roles.pool import Pool, Survey, blocks, first_states, reference_mean, survey
from dart_lab.roles.rolebook import Rolebook, vocabulary
from dart_lab.roles.sinks import NormCut, norm_cut
from dart_lab.roles.text_sinks import above_pictures, find_text_sinks
from dart_lab.roles.tower_sinks import find_tower_channels

NORM_BIN, SIMILAR_BIN = 0.02, 0.005  # widths: natural logarithm of the norm, and foreign similarity


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Parameters of a fit, all with the defaults that the definitions state.

    Attributes:
        energy: share of a token's energy on one sink channel that makes a spike; higher where ordinary text or the
            pictures' median token reaches it, see `find_text_sinks` and `above_pictures`. Default 0.10.
        ordinary: pictures of the pool, the first ones, of which that median token is. Default 8.
        floor: least |x| of a massive activation (2402.17762). Default 100.
        times_median: least multiple of the layer's median |x| that is one. Default 1000.
        often: share of the layers in which it must spike. Default 0.5.
        upto: the deepest layer looked at, as a share of the depth. Default 0.6.
        distinct: a sink channel's median size on `<bos>` and delimiters over that on other text. Default 1.5.
        centred: subtract the mean vector of the reference pictures before tokens are compared, so that a direction
            common to all of them does not hide how they differ. Default False, as the papers.
        least_dead: a group of fewer tokens than this share is not called dead. Default 0.02.
        least_similar: mean foreign similarity that the dead group must reach; below it, tokens resemble each other but
            are not the same everywhere. Default 0.8.
        least_depth: depth of the valley between dead and alive, 0 to 1; shallower, there is one group only. Default
            0.3; 0 cuts through whatever there is.
        least_alone: median foreign similarity from which one group is dead altogether; below it, none is. Default
            0.95.
        most_dead_centroids: the number of dead centroids is chosen by silhouette up to this. Default 8.
        alive_centroids: Default 32.
        clusters: of all tokens that are no sinks, for the rule "largest-cluster": how many that k-means on the sphere
            makes, or "hdbscan" for as many as the density has. Default 32.
        stored: vectors kept for clustering. Default 20,000.
        references: pictures that others are compared with. Default 32.
        draws: bootstrap draws of pictures for the intervals. Default 1000.
    """

    energy: float = 0.10
    ordinary: int = 8
    floor: float = 100.0
    times_median: float = 1000.0
    often: float = 0.5
    upto: float = 0.6
    distinct: float = 1.5
    centred: bool = False
    least_dead: float = 0.02
    least_similar: float = 0.8
    least_depth: float = 0.3
    least_alone: float = 0.95
    most_dead_centroids: int = 8
    alive_centroids: int = 32
    clusters: int | Literal["hdbscan"] = 32
    stored: int = 20_000
    references: int = 32
    draws: int = 1000

    def __post_init__(self) -> None:
        if self.clusters != "hdbscan":
            check_whole("clusters", self.clusters, least=1, hint='or "hdbscan"')


def fit_rolebook(
    vlm: Any, pool: Pool, out: Path, *, seed: int = 0, how: Fit | None = None, batch: int = 8, progress: bool = False
) -> Rolebook:
    """Fit a rolebook on a pool of pictures and save it; a fit that was stopped goes on where it was.

    Args:
        vlm: the loaded model.
        pool: see `dart_lab.roles.pool.open_pool`.
        out: the file of the book. Beside it, a folder `OUT.work` holds the blocks until the book is written.
        seed: of the clusters, the stored vectors and the bootstrap.
        how: parameters.
        batch: pictures in one pass.
        progress: show a progress bar on stderr.

    Raises:
        DartLabError: `out` cannot be written, its work folder belongs to another fit, or the pool cannot be used.
    """
    how = how or Fit()
    check_writable(out.parent)
    check_targets([out])
    identity = identity_of(vlm)
    spikes = find_text_sinks(vlm, how)
    chosen = Survey(channels=spikes.channels, layers=spikes.layers, energy=spikes.energy, centred=how.centred,
                    references=how.references, stored=how.stored, seed=seed, batch=batch)  # fmt: skip
    first = first_states(vlm, pool, chosen, how.ordinary)
    if first is not None:
        spikes = above_pictures(spikes, first)
        chosen = replace(chosen, energy=spikes.energy)
    work = out.with_name(out.name + ".work")
    skipped = survey(vlm, pool, chosen, work, identity, progress=progress)
    labels = _Labels(work, how, chosen)
    centroids, evidence = labels.cluster(seed)
    tower = find_tower_channels(vlm, pool, how)
    evidence["why"][LLM_SINK] = spikes.why
    evidence["text sinks"] = spikes.profile
    evidence["why"]["vit channels"] = tower.why
    table = vocabulary(vlm, centred=how.centred)
    words = {
        role: nearest_ids(rows, table.to(rows.device), k=1).ids[:, 0].unique().tolist()
        for role, rows in centroids.items()
    }
    prevalence, counted = labels.prevalence(seed)
    book = Rolebook(
        identity=identity,
        pool={"name": pool.name, "pictures": counted, "tokens": labels.tokens, "details": dict(pool.details),
              "seed": seed, "skipped": skipped, **vars(how)},
        vit_cut=labels.vit.cut, channels=spikes.channels, layers=spikes.layers, energy=spikes.energy, often=how.often,
        dead_cut=labels.dead_cut, dead_cosine=labels.dead_cosine, centroids=centroids,
        mean=reference_mean(work) if how.centred else None, words=words, prevalence=prevalence, evidence=evidence,
        vit_channels=tower.channels, clusters=labels.clusters(seed),
    )  # fmt: skip
    book.save(out)
    shutil.rmtree(work)
    return book


class _Labels:
    """Reads the blocks again and again, one at a time, and labels every token of the pool."""

    def __init__(self, work: Path, how: Fit, chosen: Survey) -> None:
        self.work, self.how, self.tokens = work, how, 0
        self.main = 1 if len(chosen.shares) > 1 else 0  # the share that labels
        self.shares = chosen.shares
        norms = Histogram(NORM_BIN)
        for block in blocks(work):
            self.tokens += len(block["norm"])
            norms.add(np.log(np.maximum(block["norm"][np.isfinite(block["norm"])], np.finfo(np.float32).tiny)))
        if not self.tokens:
            raise DartLabError("no picture of the pool could be used; see what was left out")
        self.norms = norms
        self.vit = norm_cut(norms) if norms.total else NormCut(
            cut=None, why="features and tokens are not one to one in this model: norms cannot be told"
        )  # fmt: skip
        self.similar = [Histogram(SIMILAR_BIN) for _ in self.shares]
        for block in blocks(work):
            rest = ~self._sinks(block)[0] & ~self._sinks(block)[1]
            for column, histogram in enumerate(self.similar):
                histogram.add(block["similar"][rest, column])
        self.cuts, self.depths = [], []
        for histogram in self.similar:
            cut, depth = self._cut(histogram)
            self.cuts.append(cut)
            self.depths.append(depth)
        self.dead_cut = self._dead_cut()
        self.dead_cosine: float | None = None

    def _sinks(self, block: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        norm = block["norm"]
        vit = np.zeros(len(norm), bool) if self.vit.cut is None else np.nan_to_num(norm, nan=-1.0) >= self.vit.cut
        return vit, block["spikes"] >= self.how.often

    def _cut(self, histogram: Histogram) -> tuple[float | None, float]:
        if not histogram.total or len(histogram.counts) < 2:
            return None, 0.0
        return histogram.valley()

    def _dead_cut(self) -> float | None:
        """The cut if there are two groups and the upper one is the same everywhere; one group is dead or not."""
        histogram, cut = self.similar[self.main], self.cuts[self.main]
        how = self.how
        if not histogram.total:
            self.dead_why = "every token is a sink"
            return None
        centre, count = histogram.dense()
        if cut is None or self.depths[self.main] < how.least_depth:
            middle = histogram.quantile(0.5)
            kind = "all" if middle >= how.least_alone else "none"
            doubt = ""
            if kind == "all" and not how.centred:
                doubt = ", unless a direction common to all tokens hides how they differ (Fit.centred)"
            self.dead_why = f"one group of foreign similarities (valley {self.depths[self.main]:.2f} deep) " \
                            f"around {middle:.2f}: {kind} are dead{doubt}"  # fmt: skip
            return float(centre[0] - histogram.width) if kind == "all" else None
        upper = centre > cut
        mean, share = float((centre * count)[upper].sum() / count[upper].sum()), histogram.share_above(cut)
        self.dead_why = (
            f"foreign similarity above {cut:.2f}: mean {mean:.2f}, valley {self.depths[self.main]:.2f} deep, "
            f"{share:.1%} of the tokens that are no sinks"
        )
        if mean < how.least_similar or share < how.least_dead:
            self.dead_why += "; too few or too unlike to be called dead"
            return None
        return cut

    def primary(self, block: dict[str, np.ndarray], column: int | None = None) -> np.ndarray:
        """`(tokens,)`: index into `ROLES`."""
        vit, llm = self._sinks(block)
        main = self.main if column is None else column
        cut = self.dead_cut if main == self.main else self.cuts[main]
        dead = np.zeros(len(vit), bool) if cut is None or self.dead_cut is None else block["similar"][:, main] > cut
        return np.stack([vit, llm, dead, np.ones(len(vit), bool)]).argmax(axis=0)

    def cluster(self, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Centroids of every role that was found, and the evidence."""
        points, roles, drawn = self._kept()
        centroids: dict[str, Tensor] = {}
        for place, role in enumerate(ROLES):
            rows = points[torch.from_numpy(roles == place)]
            if role in (DEAD, ALIVE):
                rows = points[torch.from_numpy((roles == place) & drawn)]
            if not len(rows):
                continue
            if role in (VIT_SINK, LLM_SINK):
                centroids[role] = torch.nn.functional.normalize(rows.mean(dim=0, keepdim=True), dim=-1)
            elif role == ALIVE:
                centroids[role] = spherical_kmeans(rows, min(self.how.alive_centroids, len(rows)), seed=seed)[0]
            else:
                centroids[role] = by_silhouette(rows, self.how.most_dead_centroids, seed)
        self._calibrate(centroids, points, roles)
        evidence = {
            "why": {VIT_SINK: self.vit.why, DEAD: self.dead_why},
            "dead stability": self._stability(),
            "rules without a run": self._without_run(centroids, points, roles),
            "histograms": {"log vit norm": _plain(self.norms), "foreign similarity": _plain(self.similar[self.main])},
        }
        return centroids, evidence

    def clusters(self, seed: int) -> Clusters:
        """Clusters of the tokens that were drawn evenly and are no sinks."""
        points, roles, drawn = self._kept()
        rest = points[torch.from_numpy(drawn & (roles >= ROLES.index(DEAD)))]
        if self.how.clusters == "hdbscan":
            return dense_clusters(rest, least=self.how.least_dead, similar=self.how.least_similar)
        if not len(rest):
            return Clusters(rest)
        return Clusters.of(*spherical_kmeans(rest, min(self.how.clusters, len(rest)), seed=seed))

    def _kept(self) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """The stored vectors, the primary role of each, and which were drawn evenly."""
        vectors, owner, fair = [], [], []
        for block in blocks(self.work):
            if len(block["row"]):
                vectors.append(torch.from_numpy(block["vector"].astype(np.float32)))
                owner.append(self.primary(block)[block["row"].astype(np.int64)])
                fair.append(block["fair"].astype(bool))
        return torch.cat(vectors), np.concatenate(owner), np.concatenate(fair)

    def _calibrate(self, centroids: dict[str, Tensor], points: Tensor, roles: np.ndarray) -> None:
        """The cosine to the nearest dead centroid that tells the pool's dead and alive tokens apart best (Youden)."""
        if DEAD not in centroids:
            return
        cosine = nearest_centroid(points, centroids[DEAD])[1].numpy()
        dead, alive = np.sort(cosine[roles == ROLES.index(DEAD)]), np.sort(cosine[roles == ROLES.index(ALIVE)])
        if not len(alive):
            self.dead_cosine = float(dead[0]) - SAME_VECTOR
            return
        kept = 1 - np.arange(len(dead)) / len(dead)  # dead tokens at or above each candidate
        wrong = 1 - np.searchsorted(alive, dead, side="left") / len(alive)
        best = int(np.argmax(kept - wrong))
        below = np.searchsorted(alive, dead[best], side="left")
        floor = float(alive[below - 1]) if below else -1.0
        self.dead_cosine = (float(dead[best]) + floor) / 2 if floor < dead[best] else float(dead[best])

    def _stability(self) -> dict[str, float]:
        """κ of the pool's dead labels with those of another share of the references."""
        if self.dead_cut is None:
            return {}
        out = {}
        for column, share in enumerate(self.shares):
            if column == self.main or self.cuts[column] is None:
                continue
            pairs = [(self.primary(block) == ROLES.index(DEAD), self.primary(block, column) == ROLES.index(DEAD))
                     for block in blocks(self.work)]  # fmt: skip
            a, b = (np.concatenate(side) for side in zip(*pairs, strict=True))
            value = kappa(a, b)
            out[f"share {share:g}"] = 1.0 if np.isnan(value) else value  # both call all tokens the same
        return out

    def _without_run(
        self, centroids: dict[str, Tensor], points: Tensor, roles: np.ndarray
    ) -> dict[str, dict[str, float]]:
        """Precision and recall, on the stored vectors, of the rules that look at the input vectors alone."""
        names = [role for role in ROLES if role in centroids]
        table = torch.cat([centroids[role] for role in names])
        place = np.concatenate([np.full(len(centroids[role]), ROLES.index(role)) for role in names])
        found = place[nearest_centroid(points, table)[0].numpy()]
        guesses = {role: found == ROLES.index(role) for role in (VIT_SINK, LLM_SINK)}
        if self.dead_cosine is not None:
            near, cosine = nearest_centroid(points, centroids[DEAD])[1].numpy(), self.dead_cosine
            guesses[DEAD] = near >= cosine
            if ALIVE in centroids:
                guesses[DEAD] &= near > nearest_centroid(points, centroids[ALIVE])[1].numpy()
        out = {}
        for role, guess in guesses.items():
            truth = roles == ROLES.index(role)
            if truth.any():
                hits = float((guess & truth).sum())
                out[role] = {"precision": hits / max(float(guess.sum()), 1.0), "recall": hits / float(truth.sum())}
        return out

    def prevalence(self, seed: int) -> tuple[dict[str, dict[str, float]], int]:
        """Share of tokens of every role, its 95 % interval over pictures, tokens a picture; and the pictures used."""
        counts: list[np.ndarray] = []
        for block in blocks(self.work):
            primary = self.primary(block)
            for image in np.unique(block["image"]):
                counts.append(np.bincount(primary[block["image"] == image], minlength=len(ROLES)))
        table = np.array(counts, dtype=np.float64)
        rng = np.random.Generator(np.random.PCG64(seed))
        weights = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=self.how.draws)
        drawn = weights @ table
        drawn /= drawn.sum(axis=1, keepdims=True)
        low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
        value, each = table.sum(axis=0) / table.sum(), table.mean(axis=0)
        cells = {"value": value, "low": low, "high": high, "per picture": each}
        found = {role: {name: float(cell[i]) for name, cell in cells.items()} for i, role in enumerate(ROLES)}
        return found, len(table)


def _plain(histogram: Histogram) -> dict[str, Any]:
    """A histogram as plain JSON values."""
    if not histogram.total:
        return {"width": histogram.width, "first": 0, "counts": []}
    low, high = min(histogram.counts), max(histogram.counts)
    return {"width": histogram.width, "first": low,
            "counts": [histogram.counts.get(number, 0) for number in range(low, high + 1)]}  # fmt: skip


__all__ = ["Fit", "fit_rolebook"]
