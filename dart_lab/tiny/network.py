"""The network of ``tiny`` on its training path: many questions a picture, one pass of the picture.

The modules carry the names of the hub's LLaVA format, so the weights are exported without renaming; the numbers equal
those of transformers' ``LlavaForConditionalGeneration`` (the tests hold the two together).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dart_lab.tiny.vision import Linear, Shape, VisionTower, merge_heads, split_heads


@dataclass
class Rows:
    """Attention rows wanted of one head: batch index and text position of every row, ``(rows,)`` each."""

    layer: int
    head: int
    batch: Tensor
    position: Tensor


@dataclass
class Text:
    """Questions packed behind their picture.

    ``ids``, ``segment`` (number of the question, -1 for padding) and ``place`` (position within the question) are
    ``(batch, text)`` int64.
    """

    ids: Tensor
    segment: Tensor
    place: Tensor


@dataclass
class Outputs:
    """``logits`` (batch, text, vocabulary) at the text; log attention ``rows`` (rows, prefix + visual + text).

    ``states`` (batch, text, width) are the text's states after the wanted layer.
    """

    logits: Tensor
    rows: Tensor | None
    states: Tensor | None


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(width, width, bias=False) for _ in range(4))


class _Projector(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = Linear(width, width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


class RmsNorm(nn.Module):
    """Root mean square normalisation over the last axis."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.weight = nn.Parameter(torch.ones(shape.width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Mlp(nn.Module):
    def __init__(self, width: int, ff: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, ff, bias=False)
        self.up_proj = Linear(width, ff, bias=False)
        self.down_proj = Linear(ff, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary(places: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (batch, 1, tokens, head_width / 2) of rotary embeddings at the given places (batch, tokens)."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32) / head_width
    angles = places[:, None, :, None].float() * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (batch, heads, tokens, head_width), first half against second half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass
class _Context:
    """What all layers of one pass share: rotary tables, number of prefix and visual tokens, masks, wanted rows."""

    cos: Tensor
    sin: Tensor
    before_text: int
    early: Tensor
    late: Tensor
    visual: Tensor | None
    late_from: int
    rows: Rows | None


class DecoderLayer(nn.Module):
    """One Llama layer over prefix, visual tokens and packed questions."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.shape, self.number = shape, number
        self.self_attn = _Attention(shape.width)
        self.mlp = _Mlp(shape.width, shape.ff)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(shape), RmsNorm(shape)

    def forward(self, x: Tensor, context: _Context) -> tuple[Tensor, Tensor | None]:
        """``x`` (batch, tokens, width) after this layer (the last layer: text only), and the wanted rows."""
        n, last = context.before_text, self.number == self.shape.layers - 1
        normed = self.input_layernorm(x)
        q, k, v = (
            split_heads(proj(normed), self.shape.heads)
            for proj in (self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj)
        )
        q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        late = self.number >= context.late_from
        mask = context.late if late else context.early
        mixed = F.scaled_dot_product_attention(q[:, :, n:], k, v, attn_mask=mask)
        if not last:
            early_q, early_k, early_v = (part[:, :, :n] for part in (q, k, v))
            if late and context.visual is not None:
                seen = F.scaled_dot_product_attention(early_q, early_k, early_v, attn_mask=context.visual)
            else:
                seen = F.scaled_dot_product_attention(early_q, early_k, early_v, is_causal=True)
            mixed = torch.cat([seen, mixed], dim=2)
        rows = None
        if context.rows is not None and context.rows.layer == self.number:
            batch, position, head = context.rows.batch, context.rows.position, context.rows.head
            scores = (k[batch, head] @ q[batch, head, n + position, :, None]).squeeze(-1) / self.shape.head_width**0.5
            rows = scores.masked_fill(~mask[batch, 0, position], -torch.inf).log_softmax(dim=-1)
        x = (x[:, n:] if last else x) + self.self_attn.o_proj(merge_heads(mixed))
        return x + self.mlp(self.post_attention_layernorm(x)), rows


class _Decoder(nn.Module):
    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape, number) for number in range(shape.layers))
        self.norm = RmsNorm(shape)


class _LanguageModel(nn.Module):
    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.model = _Decoder(shape, vocabulary)
        self.lm_head = Linear(shape.width, vocabulary, bias=False)


def sincos_table(grid: int, width: int) -> Tensor:
    """Sines and cosines of row and column, (grid * grid, width)."""
    quarter = width // 4
    rates = 100.0 ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
    angles = torch.arange(grid, dtype=torch.float32)[:, None] * rates
    line = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = line[:, None].expand(-1, grid, -1), line[None].expand(grid, -1, -1)
    return torch.cat([rows, columns], dim=-1).reshape(grid * grid, width)


class TinyNetwork(nn.Module):
    """Vision tower, projector and language model of ``tiny``.

    ``prefix`` are the token ids before the picture. Text positions follow those of a whole picture, also for windows.
    """

    def __init__(self, shape: Shape, vocabulary: int, prefix: list[int]) -> None:
        super().__init__()
        self.shape, self.prefix = shape, prefix
        self.vision_tower = VisionTower(shape)
        self.multi_modal_projector = _Projector(shape.width)
        self.language_model = _LanguageModel(shape, vocabulary)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        depth = (2 * self.shape.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")):
                parameter.data.mul_(depth)
        embeddings = self.vision_tower.vision_model.embeddings
        nn.init.normal_(embeddings.class_embedding, std=0.5)
        embeddings.position_embedding.weight.data[0] = 0.0
        embeddings.position_embedding.weight.data[1:] = sincos_table(self.shape.grid, self.shape.width)
        nn.init.normal_(self.language_model.model.embed_tokens.weight, std=0.5)
        nn.init.zeros_(self.language_model.lm_head.weight)

    def multiply_in(self, precision: torch.dtype) -> None:
        """Set the precision of all matrix products but those inside attention."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.precision = precision

    def places(self, origin: Tensor, size: int) -> Tensor:
        """Places on the canvas (batch, size * size) of the patches of windows at ``origin`` (batch, 2): column, row."""
        steps = torch.arange(size)
        rows, columns = origin[:, 1, None] + steps, origin[:, 0, None] + steps
        return (rows[:, :, None] * self.shape.grid + columns[:, None, :]).flatten(1)

    def look(self, pixels: Tensor, origin: Tensor, want_cls: bool = True) -> tuple[Tensor, Tensor | None]:
        """Features (batch, patches, width) that the projector reads, and the final class token (batch, width)."""
        places = self.places(origin, pixels.shape[-1] // self.shape.patch)
        return self.vision_tower.vision_model(pixels, places, want_cls)

    def answer(
        self,
        features: Tensor,
        origin: Tensor,
        text: Text,
        *,
        late_from: int = 2,
        blocked: Tensor | None = None,
        keep: Tensor | None = None,
        rows: Rows | None = None,
        states_after: int | None = None,
    ) -> Outputs:
        """Read the questions behind their pictures.

        Args:
            features: (batch, patches, width) from ``look``.
            origin: (batch, 2) column and row of the window on the canvas, patches.
            text: the packed questions.
            late_from: first layer where ``keep`` holds; before it ``blocked`` holds.
            blocked: (batch,) bool; the text of these pictures does not see visual tokens before ``late_from``.
            keep: (batch, patches) bool; from ``late_from`` on the other visual tokens are seen by nobody but
                themselves, which equals dropping them there.
            rows: attention rows to return.
            states_after: layer after which the states of the text are returned.
        """
        batch, patches, _ = features.shape
        decoder, p = self.language_model.model, len(self.prefix)
        lead = decoder.embed_tokens(torch.tensor(self.prefix)).expand(batch, -1, -1)
        x = torch.cat([lead, self.multi_modal_projector(features), decoder.embed_tokens(text.ids)], dim=1)
        places = torch.cat(
            [
                torch.arange(p).expand(batch, -1),
                p + self.places(origin, int(patches**0.5)),
                p + self.shape.grid**2 + text.place,
            ],
            dim=1,
        )
        cos, sin = rotary(places, self.shape.head_width, self.shape.theta)
        same = (text.segment[:, :, None] == text.segment[:, None, :]) & (
            text.place[:, :, None] >= text.place[:, None, :]
        )
        length = text.ids.shape[1]
        early = torch.ones(batch, 1, length, p + patches + length, dtype=torch.bool)
        early[:, 0, :, p + patches :] = same
        late, visual = early.clone(), None
        if blocked is not None:
            early[:, :, :, p : p + patches] = ~blocked[:, None, None, None]
        if keep is not None:
            late[:, :, :, p : p + patches] = keep[:, None, None, :]
            seen = torch.cat([torch.ones(batch, p, dtype=torch.bool), keep], dim=1)
            causal = torch.ones(p + patches, p + patches, dtype=torch.bool).tril()
            visual = (causal & (seen[:, None, :] | torch.eye(p + patches, dtype=torch.bool)))[:, None]
        context = _Context(cos, sin, p + patches, early, late, visual, late_from, rows)
        wanted, states = None, None
        for number, layer in enumerate(decoder.layers):
            x, found = layer(x, context)
            states = x[:, -length:] if number == states_after else states
            wanted = found if found is not None else wanted
        return Outputs(self.language_model.lm_head(decoder.norm(x)), wanted, states)
