"""FasterVLM: keep the patches that the vision tower's class token attends to most (arXiv 2412.01818)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from dart_lab.pruners.base import PositionPolicy, ScorePruner, Stage
from dart_lab.pruners.class_token import NEEDS, class_attention, class_token_note
from dart_lab.pruners.reduction import Reduction
from dart_lab.pruners.signals import Signals


@dataclass(frozen=True, kw_only=True)
class FasterVLM(ScorePruner):
    """Class-token attention in the layer that gives the features, mean over heads; the best patches of every crop stay.

    Args:
        keep: patches to keep in each crop, or retention ratio.

    A vision tower without a class token is ranked by attention received from all its tokens; the note `class_token`
    `(batch,)` bool says which it was. The authors and others report much weaker results on such towers.

    >>> import torch
    >>> row = torch.tensor([0.1, 0.2, 0.5, 0.2]).expand(1, 2, 4, 4)
    >>> signals = Signals.of(visual=torch.tensor([[1, 2, 3]]), attention=row, class_token=torch.tensor([0]))
    >>> FasterVLM(keep=2)(signals).keep
    tensor([[0, 1]])

    Differs from the official code in: only the class token's row of attention is computed, not the whole tower's maps;
    crops, newlines and padding of high-resolution pictures are packed as the model does it (there, pictures are forced
    into 672×672 and newlines left out).
    """

    name: ClassVar[str] = "fastervlm"
    needs: ClassVar[frozenset[str]] = NEEDS
    positions: ClassVar[PositionPolicy] = "compact"
    paper: ClassVar[str] = "[CLS] Attention is All You Need for Training-Free Visual Token Pruning, arXiv 2412.01818"

    @property
    def stage(self) -> Stage:
        """Where this method acts."""
        return Stage("VISION_OUT")

    def score(self, signals: Signals) -> Tensor:
        """`(batch, n)`: attention from the class token."""
        return class_attention(signals)

    def reduce(self, signals: Signals, asked: Tensor) -> Reduction:
        """Keep the best patches and note what ranked them."""
        return replace(super().reduce(signals, asked), notes=class_token_note(signals))
