"""The definitions of the roles, each selectable by name; a definition gives every role one rule.

Rules that differ from the default change the numbers: two papers disagree about roles because their rules do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.roles.dead_rules import DeadCosine, Faint, LargestCluster, LeaveOneOut, Unchanged
from dart_lab.roles.labels import DEAD, LLM_SINK, VIT_SINK
from dart_lab.roles.llm_rules import Energy, LikeFirst, Loud, Phi, Psi, Received
from dart_lab.roles.rule import Lens, NearestCentroid, NoToken, Rule
from dart_lab.roles.vit_rules import ColumnSums, Norm, NormAuto, NormSpread, NormTop, VisionChannels

#: role → name of a rule, or a rule with numbers of one's own, such as `Norm(150)`
Definition = Mapping[str, str | Rule]

#: role → name → rule; the first of each is the default.
RULES: Mapping[str, Mapping[str, Rule]] = {
    VIT_SINK: {
        "norm-auto": NormAuto(), "norm": Norm(), "norm-spread": NormSpread(), "norm-top": NormTop(),
        "channels": VisionChannels(), "column-sums": ColumnSums(), "centroid": NearestCentroid(VIT_SINK),
        "lens": Lens(VIT_SINK), "none": NoToken(),
    },
    LLM_SINK: {
        "energy": Energy(), "phi": Phi(), "psi": Psi(), "attention": Loud(), "received": Received(),
        "like-bos": LikeFirst(), "centroid": NearestCentroid(LLM_SINK), "lens": Lens(LLM_SINK), "none": NoToken(),
    },
    DEAD: {
        "cosine": DeadCosine(), "largest-cluster": LargestCluster(), "unchanged": Unchanged(), "attention": Faint(),
        "leave-one-out": LeaveOneOut(), "centroid": NearestCentroid(DEAD), "lens": Lens(DEAD), "none": NoToken(),
    },
}  # fmt: skip
DEFAULT: Definition = {role: next(iter(rules)) for role, rules in RULES.items()}
#: The rules that need no run of the language model.
AT_INPUT: Definition = {**DEFAULT, LLM_SINK: "centroid"}
#: The released rule of EmbedLens, with words derived from this model's own centroids.
EMBEDLENS_2026: Definition = dict.fromkeys(RULES, "lens")


def check_definition(definition: Definition | None, when: Literal["run", "input"] = "run") -> dict[str, Rule]:
    """A rule for every role: the given ones, defaults for the others.

    Raises:
        DartLabError: an unknown role, rule or moment.

    >>> check_definition({"vit-sink": Norm(150), "dead": "centroid"})
    {'vit-sink': Norm(cut=150), 'llm-sink': Energy(channels=None), 'dead': NearestCentroid(role='dead')}
    """
    if when not in ("run", "input"):
        raise DartLabError(f"when={when!r}: give 'run' or 'input'")
    chosen = {**(DEFAULT if when == "run" else AT_INPUT), **(definition or {})}
    out = {}
    for role, name in chosen.items():
        if role not in RULES:
            raise DartLabError(f"unknown role {role!r}. {did_you_mean(role, RULES)}")
        if not isinstance(name, Rule) and name not in RULES[role]:
            raise DartLabError(f"unknown rule {name!r} for {role}. {did_you_mean(name, RULES[role])}")
        out[role] = name if isinstance(name, Rule) else RULES[role][name]
    return out
