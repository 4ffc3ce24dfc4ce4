"""Names and shapes that differ between transformers releases (4.57 to 5.24), and only here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dart_lab.errors import DartLabError

_TEXT_NAMES = ("language_model", "text_model", "model", "llm")
_CACHE_NAMES = ("cache", "past_key_values", "past_key_value")
DECODER_ARGUMENTS = (*_CACHE_NAMES, "use_cache", "cache_position", "logits_to_keep")  # some releases hand a tower too


def cache_of(kwargs: Mapping[str, Any]) -> Any | None:
    """The KV cache among a layer's keyword arguments, whatever its name in this release."""
    return next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)


def cache_argument(module: nn.Module) -> str:
    """The name under which a model or a decoder layer takes its KV cache in this release."""
    taken = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_NAMES if name in taken), _CACHE_NAMES[1])


def with_positions(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs with the positions that `generate` gives a left-padded prompt: counted from each row's first real token.

    A model that works out its own positions from grids (M-RoPE) is left to do so.
    """
    mask = inputs.get("attention_mask")
    if mask is None or "position_ids" in inputs or hasattr(getattr(model, "model", model), "get_rope_index"):
        return dict(inputs)
    return {**inputs, "position_ids": (mask.long().cumsum(dim=-1) - 1).clamp(min=0)}


def new_cache() -> Any:
    """An empty KV cache that grows layer by layer."""
    return DynamicCache()


def cached_length(kwargs: Mapping[str, Any]) -> int:
    """Columns cached before this forward pass, from the text model's keyword arguments.

    Layer 0 knows, since no method shortens it. Releases before 5.4 pass `cache_position`, which is right also for a
    static cache whose padding has keys of zero.
    """
    position = kwargs.get("cache_position")
    if isinstance(position, Tensor) and position.numel():
        return int(position[0])
    cache = cache_of(kwargs)
    return 0 if cache is None else int(cache.get_seq_length())


def cache_layer(cache: Any | None, index: int) -> Any | None:
    """The part of the cache that belongs to decoder layer `index`; None before its first use."""
    layers = getattr(cache, "layers", None)
    return layers[index] if layers is not None and index < len(layers) else None


def fixed_length(layer: Any | None) -> int | None:
    """Slots of a static cache layer, used or not; None for one that grows."""
    length = getattr(layer, "max_cache_len", None)
    return int(length) if length is not None else None


def text_model(model: Any) -> Any:
    """The stack of decoder layers inside a model: the module with `layers` and a final `norm`."""
    found: Any = model.get_decoder() if hasattr(model, "get_decoder") else model
    for _ in range(4):
        if isinstance(getattr(found, "layers", None), nn.ModuleList) and hasattr(found, "norm"):
            return found
        found = next((x for x in (getattr(found, name, None) for name in _TEXT_NAMES) if x is not None), None)
        if found is None:
            break
    raise DartLabError(
        f"{type(model).__name__} has no stack of decoder layers that dart-lab knows; give a Hugging Face model whose "
        "text model has `layers` and `norm`"
    )


def self_attention(layer: nn.Module) -> Any:
    """The self-attention module of a decoder layer or a vision block, the one that calls the kernel."""
    for name, child in layer.named_children():
        if _is_attention(name):
            for module in (child, getattr(child, "attention", None)):  # DINOv2 of earlier releases holds it one deeper
                if hasattr(module, "config"):
                    return module
    raise DartLabError(
        f"{type(layer).__name__} has no self-attention module (a linear-attention layer?); choose another layer"
    )


def vision_tower(model: nn.Module) -> nn.Module | None:
    """The image encoder of a model, if it has one."""
    inner = getattr(model, "model", model)
    for owner in (inner, model):
        for name in ("vision_tower", "visual", "vision_model", "image_tower", "vpm"):
            tower = getattr(owner, name, None)
            if isinstance(tower, nn.Module):
                return tower
    return None


def vision_towers(model: nn.Module) -> list[nn.Module]:
    """The encoders of pictures and of videos, where these are two; the one encoder otherwise; none if there is none."""
    found = [vision_tower(model), getattr(getattr(model, "model", model), "video_tower", None)]
    return [tower for tower in found if isinstance(tower, nn.Module)]


def vision_blocks(tower: nn.Module) -> nn.ModuleList:
    """The transformer blocks of an image encoder: its longest list of modules that own attention."""
    lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList) and len(module)]
    owners = [blocks for blocks in lists if any(_is_attention(name) for name, _ in blocks[0].named_children())]
    if not owners:
        raise DartLabError(f"{type(tower).__name__} has no list of transformer blocks that dart-lab knows")
    return max(owners, key=len)


def _is_attention(name: str) -> bool:
    return "attn" in name or name == "attention"


def attended(block: Any, states: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
    """What the attention half of a vision block adds to its states `(crops, tokens, width)`; CLIP's build or DINOv2's.

    `mask` `(crops, 1, tokens, tokens)` is added to the logits, None adds nothing.
    """
    if hasattr(block, "self_attn"):
        return block.self_attn(hidden_states=block.layer_norm1(states), attention_mask=mask, **kwargs)[0]
    states = block.norm1(states)
    if "attention_mask" in inspect.signature(block.attention.forward).parameters:
        out = block.attention(states, attention_mask=mask, **kwargs)
    else:
        out = block.attention(states) if mask is None else _masked(block.attention, states, mask)
    return block.layer_scale1(out[0] if isinstance(out, tuple) else out)


def _masked(attention: Any, states: Tensor, mask: Tensor) -> Tensor:
    """DINOv2's attention with a mask, for releases whose module takes none (below 5.24)."""
    own = attention.attention
    query, key, value = (
        part(states).unflatten(-1, (own.num_attention_heads, -1)).transpose(1, 2)
        for part in (own.query, own.key, own.value)
    )
    kernel = attention_function(own, backend_of(own))
    out = kernel(own, query, key, value, mask, is_causal=own.is_causal, scaling=own.scaling)[0]
    return attention.output(out.flatten(2), states)


def transformed(block: Any, states: Tensor) -> Tensor:
    """What the MLP half of a vision block adds to its states."""
    if hasattr(block, "self_attn"):
        return block.mlp(block.layer_norm2(states))
    return block.layer_scale2(block.mlp(block.norm2(states)))


def projector(model: nn.Module) -> nn.Module:
    """The module that turns vision features into input embeddings."""
    inner = getattr(model, "model", model)
    for owner in (inner, model):
        for name in ("multi_modal_projector", "connector", "resampler"):
            found = getattr(owner, name, None)
            if isinstance(found, nn.Module):
                return found
    raise DartLabError(f"{type(model).__name__} has no multi_modal_projector; reduce inside the language model instead")


def tile_grid(size: tuple[int, int], view: int, tiles: int) -> tuple[int, int]:
    """Tiles down and across that InternVL's image processor lays over a picture of `size` (width, height).

    Args:
        size: of the picture.
        view: pixels a side of a tile.
        tiles: how many there are, without the thumbnail. Among grids of so many tiles the processor's own choice wins,
            whatever least and largest number it was set to.
    """
    names = (f"transformers.models.got_ocr2.image_processing_{kind}got_ocr2" for kind in ("pil_", ""))
    module = import_module(next(name for name in names if find_spec(name) is not None))
    columns, rows = module.get_optimal_tiled_canvas((size[1], size[0]), (view, view), tiles, tiles)
    return int(rows), int(columns)


def returns_tuple(block: nn.Module) -> bool:
    """True for releases whose vision blocks return a tuple; later ones return the states alone."""
    return "tuple" in str(inspect.signature(type(block).forward).return_annotation).lower()


def backend_of(module: Any) -> str:
    """Name of the attention kernel that a module uses now: "sdpa", "eager", "flash_attention_2", "flex_attention" …"""
    return str(getattr(module.config, "_attn_implementation", None) or "eager")


def attention_function(module: Any, backend: str) -> Callable[..., Any]:
    """The function that `module` calls for `backend`; eager lives in the module's own file."""
    if backend == "eager":
        if "head_mask" in inspect.signature(type(module).forward).parameters:
            return _eager
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[backend]  # type: ignore[no-any-return]


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention that adds its mask; that of vision modules in transformers 4 multiplies by it (a head mask)."""
    logits = query @ key.mT * scaling
    weights = torch.softmax(logits if mask is None else logits + mask, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attention_registry() -> MutableMapping[str, Callable[..., Any]]:
    """Where transformers looks up attention functions by name."""
    return ALL_ATTENTION_FUNCTIONS  # type: ignore[no-any-return]


def real_tokens(mask: Any, total: int) -> Tensor | None:
    """`(batch, total)` bool, which columns are no padding, from the text model's attention mask; None if it does not
    say.

    A ready-made 4-D mask or block mask says it in its last row, the prompt's last token.
    """
    mask = opened(mask)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    columns = mask if mask.dim() == 2 else mask[:, 0, -1]
    if columns.dtype != torch.bool:
        columns = columns > 0 if mask.dim() == 2 else columns >= 0
    return columns[:, :total]


def opened(mask: Any) -> Any:
    """A block mask of FlexAttention as `(batch | 1, 1, queries, keys)` bool; any other mask as it is."""
    if not isinstance(mask, BlockMask):
        return mask
    device = mask.kv_num_blocks.device
    row, query, column = (torch.arange(n, device=device) for n in (mask.shape[0], *mask.seq_lengths))
    head = torch.zeros((), dtype=torch.int64, device=device)
    allowed = mask.mask_mod(row[:, None, None], head, query[None, :, None], column[None, None, :])
    return allowed.expand(len(row), len(query), len(column))[:, None]


def block_mask(allowed: Tensor) -> BlockMask:
    """`allowed` `(batch, 1, queries, keys)` bool as FlexAttention takes it."""

    def look_up(row: Tensor, head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        return allowed[row, 0, query, column]

    batch, _, queries, keys = allowed.shape
    return create_block_mask(look_up, batch, None, queries, keys, device=allowed.device)


def mask_from_allowed(allowed: Tensor, backend: str, dtype: torch.dtype) -> Any:
    """Write `allowed` `(batch, 1, queries, keys)` bool in the form that a backend takes.

    Raises:
        DartLabError: a backend that cannot take an explicit mask.
    """
    if backend == "eager":
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
            ~allowed, torch.finfo(dtype).min
        )
    if "sdpa" in backend:
        return allowed
    if "flex" in backend:
        return block_mask(allowed)
    if "flash" in backend:
        return allowed[:, 0, -1]  # which columns there are, as the last query knows: an empty one sees its own slot
    raise DartLabError(f"attention backend {backend!r} cannot take a batch whose rows keep different numbers; use sdpa")


def hidden_image_processor(name: str) -> Any | None:
    """The Pillow class of an image processor where the release has it and still refuses it for want of torchvision.

    5.17 does that where a class's file names torchvision in a comment: Idefics3, SmolVLM. None for all others.
    """
    pillow = f"{name.removesuffix('Fast')}Pil"
    offered = getattr(transformers, pillow, None)
    real = None if offered is None else getattr(import_module(offered.__module__), pillow)
    return None if real is offered else real


def image_processor(source: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The image processor of a checkpoint, whose own settings are `settings`; the Pillow class without torchvision.

    The Pillow class of releases before 5 does not heed `size` where a picture is bounded by its area, so that it is
    told by the older names.
    """
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17 hides it one level up

    kind = hidden_image_processor(settings.get("image_processor_type", "")) or AutoImageProcessor
    made = kind.from_pretrained(source, **options)
    size = settings.get("size") or {}
    bounds = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    if all(bounds.values()) and set(bounds) <= set(inspect.signature(type(made).__init__).parameters):
        return type(made).from_pretrained(source, **{**options, **bounds})
    return made


def passes_options_on(processor: Any) -> bool:
    """False for a processor whose tokenizer cannot be given options in a call: Video-LLaVA's of earlier releases."""
    taken = inspect.signature(type(processor).__call__).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken)


EMBEDDING_METHOD = "get_vllm_embedding"  # of MiniCPM-V's own code: takes all inputs as one dict, embeds the prompt


def generating_model(model: Any) -> Any:
    """The module that runs the steps of `generate`: the language model in a model of MiniCPM-V's own code."""
    return getattr(model, "llm", model)


PREFILL_METHODS = ("_prefill", "_prefill_chunking")  # of a model with `generate`: from 5.0 on, and before


def refuse_chunks(*args: Any, **kwargs: Any) -> None:
    """Raise `DartLabError` if one of these arguments is a generation config that feeds the prompt in chunks."""
    for value in (*args, *kwargs.values()):
        size = getattr(value, "prefill_chunk_size", None)
        if size is not None:
            raise DartLabError(
                f"prefill_chunk_size={size} feeds the prompt in chunks, and a method must see all of it; leave it out"
            )


ASSISTANT_METHOD = "_get_candidate_generator"  # of a model with `generate`: makes what proposes tokens


def prompt_first(candidates: Any) -> Any:
    """What proposes tokens in assisted decoding, made to propose none in its first call, with which the prompt runs.

    A method decides from the prompt alone, and a candidate that ran with it could not be cropped from the cache.
    """
    if getattr(candidates, "requires_model_outputs", False):  # has none before the prompt has run
        return candidates
    propose = candidates.get_candidates

    def none_yet(input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        candidates.get_candidates = propose
        propose(input_ids, *args, **kwargs)  # an assistant model begins its cache here
        return input_ids, None

    candidates.get_candidates = none_yet
    return candidates


def has_position_axes(text: nn.Module) -> bool:
    """True for a text model whose rotary positions are several numbers a token (M-RoPE: time, row, column)."""
    config: Any = text.config
    for name in ("rope_parameters", "rope_scaling"):
        if "mrope_section" in (getattr(config, name, None) or {}):
            return True
    return hasattr(getattr(text, "rotary_emb", None), "mrope_section")


def refuse_unsafe_layers(model: Any, first: int) -> None:
    """Raise `DartLabError` if a decoder layer ≥ `first` would see kept slots as if they were positions."""
    config = text_model(model).config
    kinds = getattr(config, "layer_types", None)
    if kinds:
        bad = {kind for kind in kinds[first:] if kind != "full_attention"}
        if bad:
            raise DartLabError(
                f"{type(model).__name__}: layers from {first} on have {', '.join(sorted(bad))}, whose window or state "
                "would cover other tokens after pruning, so it is refused"
            )
    elif getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise DartLabError(
            f"{type(model).__name__} uses a sliding window, which would slide over kept slots; pruning is refused"
        )
