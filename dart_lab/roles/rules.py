"""The definitions of the roles, each selectable by name; a definition gives every role one rule.

Rules that differ from the default change the numbers: two papers disagree about roles because their rules do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.roles.dead import nearest_centroid
from dart_lab.roles.labels import ALIVE, DEAD, LLM_SINK, ROLES, VIT_SINK
from dart_lab.roles.lens import nearest_ids
from dart_lab.roles.sinks import energy_share, spike_over_median, spike_over_rms

if TYPE_CHECKING:
    from dart_lab.roles.rolebook import Rolebook
    from dart_lab.vlm.states import VisualStates

#: role → name of a rule
Definition = Mapping[str, str]
Flagged = tuple[Tensor, dict[str, Tensor]]
Rule = Callable[["Rolebook", "VisualStates"], Flagged]

SPREADS = 2.0  # standard deviations above the picture's mean norm (Neo et al. 2410.07149)
TOP_SHARE = 0.01  # tokens of a picture with the largest norms
PHI = 20.0  # Kang et al. 2503.03321
PSI, PSI_FLOOR = 1000.0, 100.0  # 2609.32808
LENS_IDS = 3  # nearest ids that are looked at, as in the released code of EmbedLens
TIMES_MEDIAN = 7.0  # attention of a sink over that of the median token (2510.08510: ViT sinks of LLaVA-1.5)
FAINT = 0.08  # share of the attention that all dead tokens get together (EmbedLens: less than 8 %)
SAME = 0.95  # cosine of a token with itself in deeper layers: it does not change


def _none(states: VisualStates) -> Flagged:
    return torch.zeros(len(states.embeds), dtype=torch.bool, device=states.embeds.device), {}


def _norms(states: VisualStates, rule: str) -> Tensor:
    if states.vision is None:
        raise DartLabError(
            f"rule {rule!r} reads the norms of vision features, but this model merges patches between tower and "
            "language model; give vit-sink the rule 'centroid' or 'none'"
        )
    return states.vision.float().norm(dim=-1)


def _layers(book: Rolebook, states: VisualStates, rule: str) -> Tensor:
    """`(layers, n, channels)` inputs of the layers that the book looks at."""
    if not states.layers or any(layer not in states.layers for layer in book.layers):
        raise DartLabError(f"rule {rule!r} needs a run of the language model; leave when='run'")
    return torch.stack([states.layers[layer] for layer in book.layers])


def norm_auto(book: Rolebook, states: VisualStates) -> Flagged:
    """The cut that was found on the pool; where it found none, no token."""
    if states.vision is None:
        return _none(states)
    norm = _norms(states, "norm-auto")
    flag = torch.zeros_like(norm, dtype=torch.bool) if book.vit_cut is None else norm >= book.vit_cut
    return flag, {"vit norm": norm}


def norm_spread(book: Rolebook, states: VisualStates) -> Flagged:
    """Norm above the picture's mean plus two standard deviations (Neo et al. 2410.07149)."""
    norm = _norms(states, "norm-spread")
    return norm > norm.mean() + SPREADS * norm.std(correction=0), {"vit norm": norm}


def norm_top(book: Rolebook, states: VisualStates) -> Flagged:
    """The one percent of a picture's tokens with the largest norms, at least one; ties go to the lower index."""
    norm = _norms(states, "norm-top")
    order = norm.argsort(descending=True, stable=True)[: max(round(TOP_SHARE * len(norm)), 1)]
    return torch.zeros_like(norm, dtype=torch.bool).index_fill(0, order, True), {"vit norm": norm}


def energy(book: Rolebook, states: VisualStates) -> Flagged:
    """A sink channel holds `book.energy` of the energy in half of the layers (a width-free form of Kang's rule)."""
    if not book.channels:
        return _none(states)
    share = energy_share(_layers(book, states, "energy"), book.channels)
    often = (share >= book.energy).float().mean(dim=0)
    return often >= book.often, {"llm energy": often}


def phi(book: Rolebook, states: VisualStates) -> Flagged:
    """Kang's φ > 20 on the sink channels in half of the layers (2503.03321)."""
    if not book.channels:
        return _none(states)
    often = (spike_over_rms(_layers(book, states, "phi"), book.channels) > PHI).float().mean(dim=0)
    return often >= book.often, {}


def psi(book: Rolebook, states: VisualStates) -> Flagged:
    """Ψ ≥ 1000 and |x| ≥ 100 on the sink channels in half of the layers (2609.32808)."""
    if not book.channels:
        return _none(states)
    layers = _layers(book, states, "psi")
    big = layers.float().abs()[..., list(book.channels)].amax(dim=-1) >= PSI_FLOOR
    often = ((spike_over_median(layers, book.channels) >= PSI) & big).float().mean(dim=0)
    return often >= book.often, {}


def dead_cosine(book: Rolebook, states: VisualStates) -> Flagged:
    """Nearer to a dead centroid than to an alive one, and near by the cosine that repeats the pool's labels best."""
    if book.dead_cosine is None or DEAD not in book.centroids:
        return _none(states)
    tokens = book.centre(states.embeds)
    dead = nearest_centroid(tokens, book.centroids[DEAD].to(tokens.device))[1]
    flag = dead >= book.dead_cosine
    if ALIVE in book.centroids:
        flag &= dead > nearest_centroid(tokens, book.centroids[ALIVE].to(tokens.device))[1]
    return flag, {"dead cosine": dead}


def unchanged(book: Rolebook, states: VisualStates) -> Flagged:
    """The vector hardly turns: cosine of 0.95 at least between the inputs of the first and last layer looked at."""
    layers = _layers(book, states, "unchanged").float()
    return torch.nn.functional.cosine_similarity(states.embeds.float(), layers[-1], dim=-1) >= SAME, {}


def _attention(states: VisualStates, rule: str) -> Tensor:
    """`(n,)` share of the text's attention to the picture, mean over the layers that the book looks at."""
    if states.attention is None:
        raise DartLabError(f"rule {rule!r} reads attention; use Rolebook.assign, which runs the model with it")
    return states.attention.float().mean(dim=0)


def loud(book: Rolebook, states: VisualStates) -> Flagged:
    """The text attends to it seven times as much as to the picture's median token."""
    share = _attention(states, "attention")
    return share > TIMES_MEDIAN * share.median(), {"attention": share}


def faint(book: Rolebook, states: VisualStates) -> Flagged:
    """Of the tokens to which the text attends least, as many as get less than 8 % of its attention together."""
    share = _attention(states, "attention")
    order = share.argsort(stable=True)
    few = share[order].cumsum(dim=0) < FAINT
    return torch.zeros_like(few).index_fill(0, order[few], True), {"attention": share}


def _nearest(role: str) -> Rule:
    def rule(book: Rolebook, states: VisualStates) -> Flagged:
        names = [name for name in ROLES if name in book.centroids]
        if role not in names:
            return _none(states)
        table = torch.cat([book.centroids[name] for name in names])
        owner = torch.cat([torch.full((len(book.centroids[name]),), place) for place, name in enumerate(names)])
        found = nearest_centroid(book.centre(states.embeds), table.to(states.embeds.device))[0]
        return owner.to(found.device)[found] == names.index(role), {}

    rule.__doc__ = "The nearest of all centroids is one of this role (2608.04483)."
    return rule


def _lens(role: str) -> Rule:
    def rule(book: Rolebook, states: VisualStates) -> Flagged:
        table = book.table
        if table is None:
            raise DartLabError("rule 'lens' compares with the vocabulary; give the book's table: book.with_table(vlm)")
        if not book.words.get(role):
            return _none(states)
        return nearest_ids(book.centre(states.embeds), table, k=LENS_IDS).any_of(book.words[role]), {}

    rule.__doc__ = "One of the 3 nearest vocabulary ids is a word of the role's centroids (EmbedLens, 2603.00510)."
    return rule


def _never(book: Rolebook, states: VisualStates) -> Flagged:
    """No token has this role."""
    return _none(states)


#: role → name → rule; the first of each is the default.
RULES: Mapping[str, Mapping[str, Rule]] = {
    VIT_SINK: {
        "norm-auto": norm_auto, "norm-spread": norm_spread, "norm-top": norm_top, "centroid": _nearest(VIT_SINK),
        "lens": _lens(VIT_SINK), "none": _never,
    },
    LLM_SINK: {
        "energy": energy, "phi": phi, "psi": psi, "attention": loud, "centroid": _nearest(LLM_SINK),
        "lens": _lens(LLM_SINK), "none": _never,
    },
    DEAD: {
        "cosine": dead_cosine, "centroid": _nearest(DEAD), "lens": _lens(DEAD), "unchanged": unchanged,
        "attention": faint, "none": _never,
    },
}  # fmt: skip
DEFAULT: Definition = {role: next(iter(rules)) for role, rules in RULES.items()}
#: The rules that need no run of the language model.
AT_INPUT: Definition = {**DEFAULT, LLM_SINK: "centroid"}
#: The released rule of EmbedLens, with words derived from this model's own centroids.
EMBEDLENS_2026: Definition = dict.fromkeys(RULES, "lens")


def check_definition(definition: Definition | None, when: Literal["run", "input"] = "run") -> dict[str, str]:
    """A rule for every role: the given ones, defaults for the others.

    Raises:
        DartLabError: an unknown role, rule or moment.

    >>> check_definition({"dead": "centroid"})["dead"]
    'centroid'
    """
    if when not in ("run", "input"):
        raise DartLabError(f"when={when!r}: give 'run' or 'input'")
    chosen = dict(DEFAULT if when == "run" else AT_INPUT)
    for role, name in (definition or {}).items():
        if role not in RULES:
            raise DartLabError(f"unknown role {role!r}. {did_you_mean(role, RULES)}")
        if name not in RULES[role]:
            raise DartLabError(f"unknown rule {name!r} for {role}. {did_you_mean(name, RULES[role])}")
        chosen[role] = name
    return chosen


def flags_of(role: str, rule: str, book: Rolebook, states: VisualStates) -> Flagged:
    """`(n,)` bool and the scores it was read from, by one rule."""
    return RULES[role][rule](book, states)
