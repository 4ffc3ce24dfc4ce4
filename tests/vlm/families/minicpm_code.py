"""A stand-in for MiniCPM-V 2.6, whose code is on the hub only: the same parts, names, inputs and calls, and no more.

Written as a checkpoint's own code is: one file that imports transformers alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BatchFeature, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.siglip.modeling_siglip import SiglipEncoder


class MiniCPMVConfig(Qwen2Config):
    model_type = "minicpmv"

    def __init__(
        self,
        vision_config: Any = None,
        query_num: int = 4,
        patch_size: int = 4,
        vision_batch_size: int = 16,
        **kwargs: Any,
    ):
        known = isinstance(vision_config, SiglipVisionConfig)
        own = vision_config if known else SiglipVisionConfig(**vision_config or {})
        self.query_num, self.patch_size, self.vision_batch_size = query_num, patch_size, vision_batch_size
        super().__init__(**kwargs)
        self.vision_config = own


class VisionTransformer(nn.Module):
    """SigLIP over patches in one row, as long as the longest view: `(views, 3, patch, patches · patch)`."""

    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.position_embedding = nn.Embedding(config.image_size**2, config.hidden_size)
        self.side = config.image_size
        if config._attn_implementation is None:  # transformers 4 names no kernel for a part built by hand
            config._attn_implementation = "sdpa"
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(
        self, pixel_values: Tensor, patch_attention_mask: Tensor | None = None, tgt_sizes: Tensor | None = None
    ) -> BaseModelOutput:
        states = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        place = torch.zeros(states.shape[:2], dtype=torch.long)
        for row, (height, width) in zip(place, tgt_sizes.tolist(), strict=True):
            row[: height * width] = (torch.arange(height)[:, None] * self.side + torch.arange(width)).flatten()
        states = states + self.position_embedding(place)
        mask = None
        if not bool(patch_attention_mask.all()):
            mask = torch.zeros(patch_attention_mask.shape).masked_fill(
                ~patch_attention_mask, torch.finfo(states.dtype).min
            )[:, :, None, :].expand(-1, -1, states.shape[1], -1)
        out = self.encoder(inputs_embeds=states, attention_mask=mask).last_hidden_state
        return BaseModelOutput(last_hidden_state=self.post_layernorm(out))


class Resampler(nn.Module):
    """A few learned queries attend to all patches of a view."""

    def __init__(self, queries: int, width: int, vision_width: int):
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, width))
        self.kv_proj = nn.Linear(vision_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, states: Tensor, tgt_sizes: Tensor) -> Tensor:
        keys = self.kv_proj(states)
        empty = torch.arange(keys.shape[1]) >= tgt_sizes.prod(dim=1)[:, None]
        queries = self.query.expand(len(keys), -1, -1)
        out: Tensor = self.attn(queries, keys, keys, key_padding_mask=empty)[0]
        return out


class MiniCPMVProcessor:
    """Every picture whole, and in two slices side by side; the tags and the placeholder are any special tokens."""

    image_processor = "part of this class"
    side = 4  # patches of a view
    view = "<|image_pad|>" * 4

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, source: str, **kwargs: Any) -> MiniCPMVProcessor:
        return cls(AutoTokenizer.from_pretrained(source))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoProcessor") -> None:
        """Called by `AutoProcessor` on the class that it found."""

    def __call__(self, text: list[str], images: Any = None, return_tensors: str = "pt", **kwargs: Any) -> BatchFeature:
        piece = f"<|vision_start|>{self.view}<|vision_end|>"
        whole = [one.replace("(<image>./</image>)", f"<img>{self.view}</img>{piece * 2}") for one in text]
        rows = [self.tokenizer(one)["input_ids"] for one in whole]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        opens, closes = (
            torch.isin(ids, torch.tensor(self.tokenizer.convert_tokens_to_ids(tags)))
            for tags in (["<img>", "<|vision_start|>"], ["</img>", "<|vision_end|>"])
        )
        views = [[view for one in own for view in self._views(one)] for own in images or [[] for _ in text]]
        return BatchFeature({
            "input_ids": ids,
            "attention_mask": torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows]),
            "pixel_values": views,
            "image_sizes": [[one.size for one in own] for own in images or []],
            "tgt_sizes": [torch.full((len(own), 2), self.side, dtype=torch.int32) for own in views],
            "image_bound": [
                torch.stack([first.nonzero()[:, 0] + 1, last.nonzero()[:, 0]], dim=1)
                for first, last in zip(opens, closes, strict=True)
            ],
        })  # fmt: skip

    def _views(self, picture: Any) -> list[Tensor]:
        width, height = picture.size
        parts = [(0, 0, width, height), (0, 0, width // 2, height), (width // 2, 0, width, height)]
        pixels = [np.asarray(picture.crop(part).resize((4 * self.side,) * 2)) for part in parts]
        return [
            torch.from_numpy(view / 255.0).float().reshape(self.side, 4, -1, 3).permute(3, 1, 0, 2).flatten(2)
            for view in pixels
        ]


class MiniCPMV(PreTrainedModel):
    config_class = MiniCPMVConfig
    _supports_sdpa = True

    def __init__(self, config: MiniCPMVConfig):
        super().__init__(config)
        self.llm = Qwen2ForCausalLM(config)
        self.vpm = VisionTransformer(config.vision_config)
        self.resampler = Resampler(config.query_num, config.hidden_size, config.vision_config.hidden_size)
        self.processor = None
        self.terminators = ["<|im_end|>", "<|endoftext|>"]
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.llm.get_input_embeddings()

    def get_vision_embedding(self, data: dict[str, Any]) -> list[Any]:
        views = [view for own in data["pixel_values"] for view in own]
        if not views:
            return [[] for _ in data["pixel_values"]]
        sizes = torch.vstack([own for own in data["tgt_sizes"] if len(own)])
        rows = [view.flatten(end_dim=1).permute(1, 0) for view in views]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        padded = padded.permute(0, 2, 1).reshape(len(rows), 3, -1, padded.shape[1])
        lengths = sizes.prod(dim=1)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None])[:, None]
        size = self.config.vision_batch_size
        chunks = [
            self.vpm(padded[i : i + size], patch_attention_mask=mask[i : i + size], tgt_sizes=sizes[i : i + size])
            for i in range(0, len(padded), size)
        ]
        states = self.resampler(torch.cat([chunk.last_hidden_state for chunk in chunks]), sizes)
        parts = iter(states.split([len(own) for own in data["pixel_values"] if len(own)]))
        return [next(parts) if len(own) else [] for own in data["pixel_values"]]

    def get_vllm_embedding(self, data: dict[str, Any]) -> tuple[Tensor, list[Any]]:
        known = data.get("vision_hidden_states")
        hidden = self.get_vision_embedding(data) if known is None else known
        embeds = self.llm.model.embed_tokens(data["input_ids"])
        for row, own, bounds in zip(embeds, hidden, data["image_bound"], strict=True):
            if len(own):
                places = torch.cat([torch.arange(int(start), int(end)) for start, end in bounds])
                row.scatter_(0, places[:, None].expand(-1, row.shape[1]), own.reshape(-1, row.shape[1]))
        return embeds, hidden

    def forward(self, data: dict[str, Any], **kwargs: Any) -> Any:
        embeds, _ = self.get_vllm_embedding(data)
        return self.llm(input_ids=None, position_ids=data["position_ids"], inputs_embeds=embeds, **kwargs)

    def generate(
        self,
        input_ids: Tensor,
        pixel_values: Any = None,
        tgt_sizes: Any = None,
        image_bound: Any = None,
        attention_mask: Tensor | None = None,
        tokenizer: Any = None,
        vision_hidden_states: Any = None,
        **kwargs: Any,
    ) -> Any:
        data = {"input_ids": input_ids, "image_bound": image_bound}
        if vision_hidden_states is None:
            data |= {"pixel_values": pixel_values, "tgt_sizes": tgt_sizes}
        else:
            data |= {"vision_hidden_states": vision_hidden_states}
        with torch.inference_mode():
            embeds, _ = self.get_vllm_embedding(data)
            ends = [tokenizer.convert_tokens_to_ids(token) for token in self.terminators]
            return self.llm.generate(
                inputs_embeds=embeds, pad_token_id=0, eos_token_id=ends, attention_mask=attention_mask, **kwargs
            )
