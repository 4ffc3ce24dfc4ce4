"""What pruning did to each sample: kept tokens, positions, a tidy table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from dart_lab.errors import DartLabError
from dart_lab.vlm.layout import VisualTokens

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, kw_only=True)
class Decision:
    """One method's decision about one sample at one stage.

    `step` is 0 for the prompt, and counts the decode steps of a method that ranks anew at each of them.
    `kept` counts within all of the sample's visual tokens, ascending; `order` the same in order of choice (or None);
    `members` `(kept tokens, visual tokens)` bool says what was merged into each kept token.
    `extra` counts kept tokens that are no patches of the picture: a class token that goes on.
    `score` has one float32 a visual token (NaN where it had none); `notes` are the method's further numbers.
    """

    method: str
    parameters: Mapping[str, Any]
    stage: str
    layer: int
    step: int
    asked: int
    kept: np.ndarray
    order: np.ndarray | None
    score: np.ndarray | None
    notes: Mapping[str, np.ndarray]
    extra: int = 0
    members: np.ndarray | None = None

    @property
    def got(self) -> int:
        """Tokens kept, a class token included."""
        return len(self.kept) + self.extra


@dataclass(eq=False)
class Sample:
    """One prompt: its visual tokens and the decisions about them, in the order of the stages.

    `view` `(height, width, 3)` uint8 is its first picture as the model saw it, in its own range of colours; it is noted
    for the first few samples of a block only.
    """

    tokens: VisualTokens
    token_ids: np.ndarray | None
    images: int = 1
    view: np.ndarray | None = None
    decisions: list[Decision] = field(default_factory=list)

    @property
    def kept(self) -> np.ndarray:
        """Visual tokens left after the last stage, as decided on the prompt."""
        return self.prompt_decisions[-1].kept if self.prompt_decisions else np.arange(len(self.tokens))

    def patches(self) -> np.ndarray:
        """`(kept tokens, visual tokens)` bool: which original tokens each kept one is made of, over all stages."""
        made_of = np.eye(len(self.tokens), dtype=bool)
        for decision in self.prompt_decisions:
            if decision.members is not None:
                merged = (decision.members.astype(np.int64) @ made_of.astype(np.int64)) > 0
                made_of[decision.kept] = merged
        return made_of[self.kept]

    def layer_counts(self, depth: int) -> list[int]:
        """Visual tokens that each of `depth` decoder layers processes in the prompt; a kept class token counts."""
        cuts = {d.layer if d.stage == "LLM_LAYER" else 0: d.got for d in self.prompt_decisions}
        out, now = [], len(self.tokens)
        for layer in range(depth):
            now = cuts.get(layer, now)
            out.append(now)
        return out

    @property
    def prompt_decisions(self) -> list[Decision]:
        """One decision a stage; without the later ones of a method that ranks anew at each decode step."""
        return [decision for decision in self.decisions if decision.step == 0]


@dataclass(eq=False)
class Run:
    """Everything `prune` recorded, sample by sample in the order in which the model saw them.

    With beams or several returned sequences a sample counts once. A step without KV cache that runs the same prompt
    again is not a new sample. `mode` is "drop" (decided once, on the prompt) or "mask" (ranked anew at every step).
    `cached`: decoder layer → tokens that a method for the KV cache kept there in the last prompt, row by row.
    """

    samples: list[Sample] = field(default_factory=list)
    mode: str = "drop"
    cached: dict[int, list[int]] = field(default_factory=dict)

    @property
    def kept(self) -> list[np.ndarray]:
        """Kept visual tokens of each sample: int64, ascending, counted within the sample's visual tokens."""
        return [sample.kept for sample in self.samples]

    @property
    def positions(self) -> list[np.ndarray]:
        """The same as positions in the prompt's sequence (padding counts)."""
        return [sample.tokens.position[sample.kept] for sample in self.samples]

    @property
    def asked(self) -> list[int]:
        """Tokens each sample was asked to keep by its last stage; -1 where a threshold decided."""
        return [
            sample.prompt_decisions[-1].asked if sample.decisions else len(sample.tokens) for sample in self.samples
        ]

    @property
    def got(self) -> list[int]:
        """Tokens each sample kept."""
        return [s.prompt_decisions[-1].got if s.prompt_decisions else len(s.tokens) for s in self.samples]

    @property
    def layout(self) -> list[VisualTokens]:
        """Where each sample's visual tokens lie."""
        return [sample.tokens for sample in self.samples]

    def notes(self, sample: int = 0, stage: int = -1) -> Mapping[str, np.ndarray]:
        """The method's further numbers about one sample, e.g. DART's pivots and ε."""
        return self.samples[sample].decisions[stage].notes

    def _repr_png_(self) -> bytes | None:
        """In a notebook: the kept tokens over the first pictures; nothing where no picture was seen."""
        from dart_lab.displays.overlay import overlay
        from dart_lab.displays.style import png_bytes

        shown = [(Image.fromarray(sample.view), sample) for sample in self.samples if sample.view is not None]
        if not shown:
            return None
        tokens, kept = [sample.tokens for _, sample in shown], [sample.kept for _, sample in shown]
        return png_bytes(overlay([picture for picture, _ in shown], tokens, kept))

    def table(self) -> pd.DataFrame:
        """A tidy table, one row a visual token (and stage).

        Columns: sample, image, frame, crop, row, column, kept, score, order, method, stage, step, layer, asked, got,
        token (number within the sample), position (in the sequence), kind. `order` is -1 for tokens that were not
        chosen or unordered.

        Raises:
            DartLabError: nothing was recorded.
        """
        import pandas as pd

        if not self.samples:
            raise DartLabError("nothing was recorded: run the model inside the `with` block, on a prompt with an image")
        return pd.concat(list(self._frames()), ignore_index=True)

    def _frames(self) -> Iterator[pd.DataFrame]:
        import pandas as pd

        for number, sample in enumerate(self.samples):
            tokens = sample.tokens
            for decision in sample.decisions:
                n = len(tokens)
                kept, order = np.zeros(n, dtype=bool), np.full(n, -1, dtype=np.int64)
                kept[decision.kept] = True
                if decision.order is not None:
                    order[decision.order] = np.arange(len(decision.order))
                score = np.full(n, np.nan, dtype=np.float32) if decision.score is None else decision.score
                yield pd.DataFrame(
                    {
                        "sample": number,
                        "image": tokens.image,
                        "frame": tokens.frame,
                        "crop": tokens.crop,
                        "row": tokens.row,
                        "column": tokens.column,
                        "kept": kept,
                        "score": score,
                        "order": order,
                        "method": decision.method,
                        "stage": decision.stage,
                        "step": decision.step,
                        "layer": decision.layer,
                        "asked": decision.asked,
                        "got": decision.got,
                        "token": np.arange(n),
                        "position": tokens.position,
                        "kind": tokens.kind,
                    }
                )
