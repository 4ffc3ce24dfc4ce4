"""`mini` while it is trained: frozen vision tower and language model, a projector, and low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dart_lab.vlm import compat

RANK, ALPHA = 8, 16.0  # of the adapters; they are multiplied by ALPHA / RANK
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
FEATURES_AT = -2  # hidden states of the vision tower that the projector reads


class FrozenLinear(nn.Module):
    """A linear map that is not trained and multiplies in ``precision``; input and output are float32."""

    def __init__(self, weight: Tensor, precision: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight.to(precision), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` -> ``(..., out)``."""
        return F.linear(x.to(self.weight.dtype), self.weight).float()


class Adapted(FrozenLinear):
    """A frozen linear map with a trained low-rank addition, LoRA (arXiv 2106.09685): W x + (alpha / r) B A x."""

    def __init__(self, weight: Tensor, precision: torch.dtype) -> None:
        super().__init__(weight, precision)
        rows, columns = weight.shape
        self.lora_a = nn.Parameter(torch.randn(RANK, columns) * columns**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` -> ``(..., out)``."""
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * (ALPHA / RANK)


class Projector(nn.Module):
    """LLaVA's projector under its names: two linear maps with a GELU between."""

    def __init__(self, vision_width: int, width: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(vision_width, width), nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """``(..., vision width)`` -> ``(..., width)``."""
        return self.linear_2(F.gelu(self.linear_1(features)))


@dataclass(frozen=True)
class Packed:
    """Several questions about every picture, each blind to the others.

    ``before`` (tokens before the picture,) and ``ids`` (batch, text), the tokens after it; ``segment`` (batch, text) is
    the question's number, -1 for tokens that all questions share and -2 for padding; ``place`` (batch, text) counts
    from the first token after the picture. ``target`` (batch, text) is the next token where it is scored, -1 elsewhere.
    """

    before: Tensor
    ids: Tensor
    segment: Tensor
    place: Tensor
    target: Tensor

    def mask(self, visual: int) -> Tensor:
        """(batch, 1, length, length) bool: who may look at whom."""
        lead = len(self.before) + visual
        segment = F.pad(self.segment, (lead, 0), value=-1)
        length = segment.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        query, key = segment[:, :, None], segment[:, None, :]
        itself = torch.eye(length, dtype=torch.bool)
        return (causal & ((key == -1) | (key == query)) & (key != -2) | itself)[:, None]

    def positions(self, visual: Tensor, whole: int) -> Tensor:
        """(batch, length) position ids; visual tokens ``visual`` (batch, shown) of ``whole`` keep their places."""
        start = len(self.before)
        lead = torch.arange(start).expand(len(self.ids), -1)
        return torch.cat([lead, start + visual, start + whole + self.place], dim=1)


class MiniNetwork(nn.Module):
    """Its ``state_dict`` holds what is trained: projector and adapters."""

    def __init__(self, model: Any, precision: torch.dtype = torch.float32) -> None:
        """``model`` is a `LlavaForConditionalGeneration` in float32; its language model is taken apart."""
        super().__init__()
        tower: Any = compat.vision_tower(model)
        text = compat.text_model(model)
        self.frozen = [
            tower.eval().requires_grad_(False),
            text.eval().requires_grad_(False),
        ]  # a list: not in the state
        self.projector = Projector(tower.config.hidden_size, text.config.hidden_size)
        adapters = {}
        for name, module in list(text.named_modules()):
            for part, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    made = (Adapted if part in ADAPTED else FrozenLinear)(child.weight.detach(), precision)
                    setattr(module, part, made)
                    if isinstance(made, Adapted):
                        adapters[f"{name}.{part}".replace(".", "/")] = made
        self.adapters = nn.ModuleDict(adapters)

    @property
    def embedding(self) -> Tensor:
        """(vocabulary, width): the table of the tokens, which is the output head too."""
        return self.frozen[1].embed_tokens.weight

    @torch.no_grad()
    def look(self, pixels: Tensor) -> Tensor:
        """(batch, 3, side, side), normalised -> (batch, patches, vision width): what the projector reads."""
        return self.frozen[0](pixels, output_hidden_states=True).hidden_states[FEATURES_AT][:, 1:]

    def answer(self, features: Tensor, packed: Packed, shown: Tensor | None = None, whole: int | None = None) -> Tensor:
        """Logits (scored, vocabulary) at the places where ``packed.target`` is set, in their order.

        Where ``features`` are those of a part of a picture's ``whole`` tokens, ``shown`` (batch, tokens) says which.
        """
        visual = features.shape[1]
        if shown is None or whole is None:
            shown, whole = torch.arange(visual).expand(len(features), -1), visual
        before = self.embedding[packed.before].expand(len(features), -1, -1)
        states = torch.cat([before, self.projector(features), self.embedding[packed.ids]], dim=1)
        out = self.frozen[1](
            inputs_embeds=states, attention_mask=packed.mask(visual), position_ids=packed.positions(shown, whole),
            use_cache=False,
        ).last_hidden_state  # fmt: skip
        return F.linear(out[:, -packed.ids.shape[1] :][packed.target >= 0], self.embedding)
