"""The definitions of the roles, each selectable by name; a definition gives every role one rule.

Rules that differ from the default change the numbers: two papers disagree about roles because their rules do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.roles.dead_rules import DeadCosine, Faint, LargestCluster, LeaveOneOut, Unchanged
from dart_lab.roles.labels import DEAD, LLM_SINK, VIT_SINK
from dart_lab.roles.llm_rules import Energy, EnergyOrAttention, LikeFirst, Loud, Phi, Psi, Received
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
        "energy": Energy(), "phi": Phi(), "psi": Psi(), "attention": Loud(),
        "energy-or-attention": EnergyOrAttention(), "received": Received(), "like-bos": LikeFirst(),
        "centroid": NearestCentroid(LLM_SINK), "lens": Lens(LLM_SINK), "none": NoToken(),
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
        DartLabError: an unknown role, rule or moment, or a rule that reads a run when there is none.

    >>> check_definition({"vit-sink": Norm(150), "dead": "centroid"})
    {'vit-sink': Norm(cut=150), 'llm-sink': Energy(channels=None), 'dead': NearestCentroid(role='dead')}
    """
    if when not in ("run", "input"):
        raise DartLabError(f"when={when!r}: give 'run' or 'input'")
    if definition is not None and not isinstance(definition, Mapping):
        raise DartLabError(f"definition={definition!r}: give a mapping, role to rule, such as {{'dead': 'unchanged'}}")
    chosen = {**(DEFAULT if when == "run" else AT_INPUT), **(definition or {})}
    out = {}
    for role, name in chosen.items():
        rule = out[role] = rule_of(role, name)
        if when == "input" and not rule.at_input:
            early = [other for other, one in RULES[role].items() if one.at_input]
            raise DartLabError(
                f"rule {name!r} for {role} needs a run of the language model; leave when='run', or give one of "
                f"{', '.join(early)}"
            )
    return out


def parse_definition(text: str) -> dict[str, str]:
    """Rules as the command line gives them.

    Raises:
        DartLabError: not of the form ROLE=RULE,ROLE=RULE, a role that is named twice, or as `check_definition`.

    >>> parse_definition("dead=unchanged,llm-sink=phi")
    {'dead': 'unchanged', 'llm-sink': 'phi'}
    """
    out: dict[str, str] = {}
    for part in text.split(","):
        role, equals, rule = (piece.strip() for piece in part.partition("="))
        if not (role and equals and rule) or role in out:
            raise DartLabError(f"rules {text!r}: give each role one rule, for example dead=unchanged,llm-sink=phi")
        rule_of(role, rule)
        out[role] = rule
    return out


def rule_of(role: str, rule: str | Rule) -> Rule:
    """The rule of a role that has this name; a rule with numbers of one's own stays as it is.

    Raises:
        DartLabError: an unknown role or rule, or a rule for another role.
    """
    if role not in RULES:
        raise DartLabError(f"unknown role {role!r}. {did_you_mean(str(role), RULES)}")
    rules = RULES[role]
    if isinstance(rule, str):
        if rule not in rules:
            raise DartLabError(f"unknown rule {rule!r} for {role}. {did_you_mean(rule, rules)}")
        return rules[rule]
    if not isinstance(rule, tuple(type(known) for known in rules.values())) or getattr(rule, "role", role) != role:
        raise DartLabError(f"{rule!r} is no rule for {role}; give one of {', '.join(rules)}, or such a rule's class")
    return rule
