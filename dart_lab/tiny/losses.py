"""What the network is taught: answers, what every patch shows, and where to look when it counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dart_lab.tasks import questions
from dart_lab.tiny import data
from dart_lab.tiny.network import Outputs, Rows

CLASSES = (data.SHAPE_CLASSES, data.COLOR_CLASSES, data.DIGIT_CLASSES, questions.CELLS, questions.CELLS, 1)
GROUND_WEIGHT = 0.3  # weight of patches without shape, color or digit
CELL_WEIGHT = 0.5
CENTER_WEIGHT, CENTER_POSITIVE = 3.0, 3.0
END_WEIGHT = 0.1  # weight of the end of text against an answer's tokens
FAMILY_WEIGHTS = {"relation": 1.5, "count": 1.5, "ground": 1.5, "text": 2.0}
COUNT_LAYER, COUNT_HEAD = 3, 0
REFERENT_LAYER = 4  # nouns tell after this layer where their referent is


class Heads(nn.Module):
    """Linear read-outs of the vision features and of nouns, used in training only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Linear(width, sum(CLASSES))
        self.tags = nn.Linear(width, data.TAGS)
        self.referent = nn.Linear(width, 2 * data.STRIPS)
        nn.init.zeros_(self.referent.weight)
        nn.init.zeros_(self.referent.bias)


def vision_loss(heads: Heads, features: Tensor, cls: Tensor, target: data.Patches) -> tuple[Tensor, dict[str, float]]:
    """Loss of the dense read-outs, and the share of right classes on covered patches.

    ``features`` (batch, patches, width), ``cls`` (batch, width).
    """
    shape, color, digit, column, row, center = heads.patches(features).split(CLASSES, dim=-1)
    loss = torch.zeros(())
    right = {}
    for name, logits, labels in (
        ("shape", shape, target.shape),
        ("color", color, target.color),
        ("digit", digit, target.digit),
    ):
        weight = torch.ones(logits.shape[-1])
        weight[data.NONE] = GROUND_WEIGHT
        loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)
        shown = labels != data.NONE
        right[name] = float((logits.argmax(-1) == labels)[shown].float().mean()) if shown.any() else 1.0
    for logits, labels in ((column, target.column), (row, target.row)):
        loss = loss + CELL_WEIGHT * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
    positive = torch.tensor(CENTER_POSITIVE)
    centered = F.binary_cross_entropy_with_logits(center.squeeze(-1), target.center.clamp(max=1), pos_weight=positive)
    tags = F.binary_cross_entropy_with_logits(heads.tags(cls), target.tags)
    return loss + CENTER_WEIGHT * centered + tags, right


def answer_loss(outputs: Outputs, batch: data.Batch, eos: int) -> tuple[Tensor, dict[str, list[float]]]:
    """Weighted cross-entropy of the answers, and for every family whether each answer was exactly right."""
    weights = torch.tensor([FAMILY_WEIGHTS.get(family, 1.0) for family in questions.FAMILIES] + [0.0])
    weight = weights[batch.family]  # -1 picks the last, which is no answer
    weight = torch.where((batch.target == eos) & (weight > 0), torch.tensor(END_WEIGHT), weight)
    each = F.cross_entropy(outputs.logits.flatten(0, 1), batch.target.flatten(), reduction="none")
    loss = (each * weight.flatten()).sum() / weight.sum()
    return loss, exactly_right(outputs.logits, batch)


def exactly_right(logits: Tensor, batch: data.Batch) -> dict[str, list[float]]:
    """1 or 0 for every question, by family: all tokens of the answer and its end are the most likely ones."""
    hit = logits.argmax(-1) == batch.target
    found: dict[str, list[float]] = {}
    for i, spans in enumerate(batch.answers):
        for family, start, length in spans:
            right = float(bool(hit[i, start : start + length].all()))
            found.setdefault(questions.FAMILIES[family], []).append(right)
    return found


def count_rows(batch: data.Batch) -> Rows | None:
    """The attention rows that counting is taught on: the counted nouns in one head, or None without such questions."""
    if len(batch.count_at) == 0:
        return None
    return Rows(COUNT_LAYER, COUNT_HEAD, batch.count_at[:, 0], batch.count_at[:, 1])


def count_loss(rows: Tensor, batch: data.Batch, prefix: int) -> Tensor:
    """Cross-entropy of the attention of a counted noun: equal parts for the first token and for each of the k centers.

    ``rows`` (rows, prefix + visual + text) log attention. The part on the first token, 1 / (k + 1), tells the number.
    """
    patches = batch.count_target.shape[1]
    share = 1 / (batch.count_target.sum(dim=1) + 1)
    log_first, log_patches = rows[:, 0], rows[:, prefix : prefix + patches]
    toward = log_first * share + (log_patches.clamp(min=-30) * batch.count_target).sum(dim=1) * share
    entropy = (batch.count_target * share[:, None]).clamp(min=1e-9).log() * batch.count_target * share[:, None]
    return -(toward - entropy.sum(dim=1) - share * share.log()).mean()


def referent_loss(heads: Heads, states: Tensor, batch: data.Batch) -> Tensor:
    """Cross-entropy of column and row of the referent, read from its noun; ``states`` (batch, text, width)."""
    at = batch.referent_at
    column, row = heads.referent(states[at[:, 0], at[:, 1]]).chunk(2, dim=-1)
    return F.cross_entropy(column, batch.referent_strip[:, 0]) + F.cross_entropy(row, batch.referent_strip[:, 1])
