"""Definitions of dead tokens: vectors that every picture has, that do not change, or that change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.roles.clusters import nearest_centroid
from dart_lab.roles.labels import ALIVE, DEAD
from dart_lab.roles.llm_rules import text_attention
from dart_lab.roles.rule import ATTENTION, EFFECT, Flagged, Rule, by_picture, inputs_of, no_token

if TYPE_CHECKING:
    from dart_lab.roles.rolebook import Rolebook
    from dart_lab.vlm.states import VisualStates


@dataclass(frozen=True)
class DeadCosine(Rule):
    """Nearer to a dead centroid than to an alive one, and near by the cosine that repeats the pool's labels best."""

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        if book.dead_cosine is None or DEAD not in book.centroids:
            return no_token(states)
        tokens = book.centre(states.embeds)
        dead = nearest_centroid(tokens, book.centroids[DEAD].to(tokens.device))[1]
        flag = dead >= book.dead_cosine
        if ALIVE in book.centroids:
            flag &= dead > nearest_centroid(tokens, book.centroids[ALIVE].to(tokens.device))[1]
        return flag, {"dead cosine": dead}


@dataclass(frozen=True)
class LargestCluster(Rule):
    """The nearest of the pool's clusters is the one with the most tokens: EmbedLens' description of dead tokens.

    The clusters are those of all stored tokens of the pool that are no sinks, dead and alive alike. How they are made
    (`Fit.clusters`) changes what this rule says: the more of them, the smaller the largest. Those of k-means leave no
    token out, so that it always finds some.
    """

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        if book.clusters is None:
            raise DartLabError("this rolebook holds no clusters of its pool; fit it again to use 'largest-cluster'")
        tokens, clusters = book.centre(states.embeds), book.clusters
        if not len(clusters.centroids):
            return no_token(states)
        near, cosine = nearest_centroid(tokens, clusters.centroids.to(tokens.device))
        return (near == 0) & (cosine >= clusters.reach), {}


@dataclass(frozen=True)
class Unchanged(Rule):
    """The vector hardly turns: cosine ≥ `least` between what enters the first layer and the deepest one looked at."""

    runs: ClassVar[bool] = True
    least: float = 0.95

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        last = inputs_of(book.layers, states, self).float()[-1]
        return torch.nn.functional.cosine_similarity(states.embeds.float(), last, dim=-1) >= self.least, {}


@dataclass(frozen=True)
class Faint(Rule):
    """Of the tokens to which the text attends least, as many as get less than `share` of its attention together.

    EmbedLens: dead tokens get less than 8 % of the attention to the picture.
    """

    needs: ClassVar[frozenset[str]] = frozenset({ATTENTION})
    share: float = 0.08

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        share = text_attention(book, states)
        return by_picture(states, share, self._faintest), {"attention": share}

    def _faintest(self, share: Tensor) -> Tensor:
        order = share.argsort(stable=True)
        few = share[order].cumsum(dim=0) < self.share * share.sum()
        return torch.zeros_like(few).index_fill(0, order[few], True)


@dataclass(frozen=True)
class LeaveOneOut(Rule):
    """Without it no logit of the next token changes by `below`; costs one run of the language model a token.

    Attributes:
        below: in logits. Default 0.01, which is this package's choice; no paper gives a number. Rounding in half
            precision alone changes more: load the model in float32.
    """

    needs: ClassVar[frozenset[str]] = frozenset({EFFECT})
    below: float = 0.01

    def flags(self, book: Rolebook, states: VisualStates) -> Flagged:
        if states.effect is None:
            raise DartLabError("rule 'leave-one-out' runs the model without each token; use Rolebook.assign")
        return states.effect < self.below, {"effect": states.effect}
