"""The vision tower of ``tiny``: a CLIP vision transformer on windows of the canvas, under the names of the hub."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; ``grid`` counts the patches along a side of the canvas."""

    width: int = 128
    heads: int = 4
    vision_layers: int = 5
    vision_ff: int = 512
    layers: int = 8
    ff: int = 384
    patch: int = 14
    grid: int = 24
    theta: float = 1e6
    norm_eps: float = 1e-5

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``(batch, tokens, width)`` -> ``(batch, heads, tokens, head_width)``."""
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """The inverse of ``split_heads``."""
    return x.transpose(1, 2).flatten(2)


class Linear(nn.Linear):
    """A linear map that may multiply in ``precision``; its input and output stay float32."""

    precision: torch.dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` -> ``(..., out)``."""
        if self.precision == torch.float32:
            return F.linear(x, self.weight, self.bias)
        product = F.linear(x.to(self.precision), self.weight.to(self.precision)).float()
        return product if self.bias is None else product + self.bias


class _VisionAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Linear(width, width) for _ in range(4))


class _VisionMlp(nn.Module):
    def __init__(self, width: int, ff: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(width, ff), Linear(ff, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class VisionLayer(nn.Module):
    """One pre-norm layer of the vision tower."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.self_attn = _VisionAttention(shape.width)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.mlp = _VisionMlp(shape.width, shape.vision_ff)

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        """``x`` (batch, tokens, width); with ``queries`` only the first so many tokens are computed."""
        normed = self.layer_norm1(x)
        asked = normed[:, :queries]
        q, k, v = self.self_attn.q_proj(asked), self.self_attn.k_proj(normed), self.self_attn.v_proj(normed)
        q, k, v = (split_heads(part, self.heads) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x[:, :queries] + self.self_attn.out_proj(merge_heads(mixed))
        return x + self.mlp(self.layer_norm2(x))


class _Embeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(shape.width))
        self.patch_embedding = nn.Conv2d(3, shape.width, shape.patch, shape.patch, bias=False)
        self.position_embedding = nn.Embedding(shape.grid**2 + 1, shape.width)


class _Encoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(shape) for _ in range(shape.vision_layers))


class VisionModel(nn.Module):
    """CLIP's vision transformer on a window of the canvas."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = _Embeddings(shape)
        self.pre_layrnorm = nn.LayerNorm(shape.width)
        self.encoder = _Encoder(shape)
        self.post_layernorm = nn.LayerNorm(shape.width)

    def forward(self, pixels: Tensor, places: Tensor, want_cls: bool = True) -> tuple[Tensor, Tensor | None]:
        """Features (batch, patches, width) of the last layer but one, and the final class token (batch, width).

        ``pixels`` (batch, 3, side, side), normalised; ``places`` (batch, patches): every patch's place on the canvas.
        """
        batch, size, patch = pixels.shape[0], pixels.shape[-1] // self.shape.patch, self.shape.patch
        patches = pixels.view(batch, 3, size, patch, size, patch).permute(0, 2, 4, 1, 3, 5).reshape(batch, size**2, -1)
        table = self.embeddings.position_embedding.weight
        x = F.linear(patches, self.embeddings.patch_embedding.weight.flatten(1)) + table[places + 1]
        cls = (self.embeddings.class_embedding + table[0]).expand(batch, 1, -1)
        x = self.pre_layrnorm(torch.cat([cls, x], dim=1))
        *layers, last = self.encoder.layers
        for layer in layers:
            x = layer(x)
        final = self.post_layernorm(last(x, queries=1))[:, 0] if want_cls else None
        return x[:, 1:], final


class VisionTower(nn.Module):
    """Holds the vision model under the name that the hub's format gives it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vision_model = VisionModel(shape)
