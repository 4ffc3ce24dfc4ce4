"""What a method may look at: the visual tokens at its stage and the tensors there, computed on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, did_you_mean
from dart_lab.pruners.reduction import PAD
from dart_lab.pruners.reduction import gather_tokens as gather_tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class Signals:
    """The input of a method at its stage. "Sequence" is the sequence as it is there, after the stages before it.

    Attributes:
        visual: `(batch, n)` int64, position in the sequence of every visual token, ascending, `-1` after the end.
        attended: `(batch, sequence)` bool, True for real tokens, False for padding.
        providers: name → function that computes the tensor. At `LLM_LAYER`, K being the layer:
            `hidden` () → `(batch, sequence, channels)`, output of layer K−1;
            `normed` () → the same through the model's final norm;
            `embeds` () → `(batch, sequence, channels)`, the input embeddings of the same tokens (before layer 0);
            `image_embeds` () → `(batch, n before any stage, channels)`, those of all visual tokens, where `embeds` is
            recorded;
            `delta` () → `(batch, sequence, channels)`, output minus input of layer K−1;
            `keys`, `values` () → `(batch, kv_heads, sequence, head_dim)` of layer K−1, after rotary embedding;
            `attention` (queries `(batch, q)`) → `(batch, heads, q, sequence)` float32, softmax rows of layer K−1;
            `attention_logits` (queries) → the same before mask and softmax: scaled products of queries and keys;
            `attention_ahead` (queries) → the same of layer K, computed on the states before it;
            `received` () → `(batch, sequence)` float32, attention received in layer K−1: mean over heads, summed over
            real queries.
            At `VISION_OUT` a row of the batch is one crop and the sequence is the tower's, class token included:
            `hidden` is the output of the feature layer, `keys`, `values`, `attention`, `received` belong to the block
            that made it, `attention@L` to block L (0-based). At `PROJECTED` `hidden` is the projector's output and the
            sequence has no class token; `relevance` () → `(batch, sequence)` is there too if the vision tower has a
            text tower beside it: cosine of each patch and the question in their shared space.
            At `LLM_IN` there is `hidden`, the packed input embeddings.
            At `VIT_BLOCK(l)`: `hidden` (after attention and its residual), `keys`, `attention`, `attention_logits`,
            `received` of block l, and `sizes` () → `(batch, sequence)` float32, patches each token stands for.
        cls: `(batch,)` int64, position of the class token in a vision tower's sequence; None: there is none.
        original: `(batch,)` int64, visual tokens of each sample before any stage; None: as many as there are now.
        grid: `(batch, n, 4)` int64: image, crop, row, column of every visual token (-1: not on a grid); None if
            unknown.
        image: `(batch,)` int64, where a row is one crop, the image it belongs to, counted over the batch; None: every
            row is an image of its own.
        region: `(batch, 4)` float32, the part of its image that a crop shows: left, top, right, bottom as shares of
            width and height; `(0, 0, 1, 1)` is a view of the whole. None: every crop is one.
        sample_seeds: () → one integer a sample, the same whatever the batch, for methods that draw; None: the row
            number.

    >>> s = Signals.of(visual=torch.tensor([[1, 2]]), hidden=torch.zeros(1, 4, 8))
    >>> s.counts, s.text
    (tensor([2]), tensor([[3]]))
    """

    visual: Tensor
    attended: Tensor
    providers: Mapping[str, Callable[..., Tensor]]
    cls: Tensor | None = None
    original: Tensor | None = None
    grid: Tensor | None = None
    image: Tensor | None = None
    region: Tensor | None = None
    sample_seeds: Callable[[], tuple[int, ...]] | None = None
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, *, visual: Tensor, attended: Tensor | None = None, grid: Tensor | None = None,
        class_token: Tensor | None = None, original: Tensor | None = None, image: Tensor | None = None,
        region: Tensor | None = None, sample_seeds: tuple[int, ...] = (),
        **tensors: Tensor,
    ) -> Signals:
        """Build signals from plain tensors, for tests and notebooks.

        `attention`, `attention_logits`, `attention_ahead` and `attention@L` are whole maps
        `(batch, heads, sequence, sequence)`; the other names are given as they come out.
        """
        providers: dict[str, Callable[..., Tensor]] = {}
        for name, tensor in tensors.items():
            providers[name] = partial(_rows, tensor) if name.startswith("attention") else partial(_same, tensor)
        if attended is None:
            by_row = [t.shape[1] for name, t in tensors.items() if name in _BY_SEQUENCE]
            length = (by_row or [t.shape[2] for t in tensors.values()] or [int(visual.max()) + 1])[0]
            attended = torch.ones(visual.shape[0], length, dtype=torch.bool, device=visual.device)
        seeds = (lambda: sample_seeds) if sample_seeds else None
        return cls(
            visual=visual, attended=attended, providers=providers, cls=class_token, original=original, grid=grid,
            image=image, region=region, sample_seeds=seeds,
        )

    @cached_property
    def valid(self) -> Tensor:
        """`(batch, n)` bool: True for visual tokens, False for the padding of a shorter row."""
        return self.visual != PAD

    @cached_property
    def counts(self) -> Tensor:
        """`(batch,)` int64: visual tokens of each sample."""
        return self.valid.sum(dim=1)

    @cached_property
    def before(self) -> Tensor:
        """`(batch,)` int64: visual tokens of each sample before any stage."""
        return self.counts if self.original is None else self.original

    @cached_property
    def text(self) -> Tensor:
        """`(batch, t)` int64: positions of the real tokens after the last visual one, the question; `-1` at the end."""
        length = self.attended.shape[1]
        position = torch.arange(length, device=self.visual.device)
        after = self.attended & (position > self.visual.max(dim=1).values[:, None])
        width = int(after.sum(dim=1).max()) if len(after) else 0
        index = torch.where(after, position, length).sort(dim=1).values[:, :width]
        return torch.where(index == length, PAD, index)

    @cached_property
    def last(self) -> Tensor:
        """`(batch,)` int64: position of each sample's last real token."""
        position = torch.arange(self.attended.shape[1], device=self.visual.device)
        return torch.where(self.attended, position, PAD).max(dim=1).values

    def get(self, name: str) -> Tensor:
        """A whole-sequence tensor by name, computed once. Raises `DartLabError` if this stage does not offer it."""
        if name not in self._cache:
            self._cache[name] = self._provider(name)()
        return self._cache[name]

    def attention(self, queries: Tensor, *, of: str = "attention") -> Tensor:
        """Attention rows of `queries` `(batch, q)`, over the whole sequence: `(batch, heads, q, sequence)` float32.

        `of` names the map: "attention" of the stage's own layer, "attention_ahead", or "attention@L" of another block.
        """
        return self._provider(of)(queries)

    def attention_to_visual(self, queries: Tensor, *, of: str = "attention") -> Tensor:
        """Attention rows of `queries` onto the visual tokens: `(batch, heads, q, n)` float32, 0 at padding."""
        rows = self.attention(queries, of=of)
        index = self.visual.clamp(min=0)[:, None, None, :].expand(-1, rows.shape[1], rows.shape[2], -1)
        return torch.gather(rows, 3, index).masked_fill(~self.valid[:, None, None, :], 0.0)

    def mean_attention(self, queries: Tensor, *, of: str = "attention", rows_at_once: int = 256) -> Tensor:
        """Attention rows of many queries, mean over heads: `(batch, q)` → `(batch, q, sequence)` float32.

        A block of rows at a time, so that no heads × queries × sequence array is held.
        """
        parts = [self.attention(rows, of=of).mean(dim=1) for rows in queries.split(rows_at_once, dim=1)]
        return torch.cat(parts, dim=1)

    def at_visual(self, rows: Tensor) -> Tensor:
        """Columns of the visual tokens: `(batch, q, sequence)` → `(batch, q, n)`, 0 at padding."""
        index = self.visual.clamp(min=0)[:, None, :].expand(-1, rows.shape[1], -1)
        return rows.gather(2, index).masked_fill(~self.valid[:, None, :], 0.0)

    def generator(self, sample: int, seed: int) -> torch.Generator:
        """A CPU generator for one sample: depends on `seed` and on the sample, not on the batch it came in."""
        own = sample if self.sample_seeds is None else self.sample_seeds()[sample]
        mixed = hashlib.blake2b(f"{seed}:{own}".encode(), digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(mixed, "big"))

    def _provider(self, name: str) -> Callable[..., Tensor]:
        if name not in self.providers:
            raise DartLabError(f"this stage has no signal {name!r}. {did_you_mean(name, self.providers)}")
        return self.providers[name]


_BY_SEQUENCE = (  # tensors whose axis 1 is the sequence
    "hidden", "normed", "embeds", "delta", "received", "sizes", "relevance",
)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _rows(attention: Tensor, queries: Tensor) -> Tensor:
    """Rows `(batch, q)` of a whole map `(batch, heads, sequence, sequence)`."""
    index = queries.clamp(min=0)[:, None, :, None].expand(-1, attention.shape[1], -1, attention.shape[3])
    return torch.gather(attention, 2, index)
