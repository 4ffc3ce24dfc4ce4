"""Small random models of every family, each with a prompt alone and a left-padded batch of unlike pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tests.models import PATCH, llava_processor
from tests.vlm import common
from tests.vlm.families import anyres_models, qwen_models, tile_models, video_llava_models

Batch = dict[str, Tensor]
PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")


@dataclass(frozen=True)
class Zoo:
    """One kind of model: how it is built, its batches, and its visual token ids.

    `prompts`: name → the pictures of each prompt of a batch, in whatever form `build_batch` takes. `one_picture`: a
    prompt about a picture, through the real image processor. `resampled`: features may be shrunk behind the tower.
    `one_video`: a prompt about a video of these frames, of which the model merges `frames_a_step` into one step.
    `through`: pixels of the longer side to which a picture is resized before its tiles are cut, if it is.
    """

    name: str
    build: Callable[[str], Any]
    build_batch: Callable[[Any], Batch]
    prompts: dict[str, Any]
    visual: tuple[int, ...]
    one_picture: Callable[[Image.Image], Batch]
    view_patch: int  # pixels of the model's view a visual token is wide
    resampled: bool = False
    through: int = 0
    pixels: str = "pixel_values"
    per_picture: Callable[[Any, Batch, int], Batch] | None = field(default=None)
    one_video: Callable[[Sequence[Image.Image]], Batch] | None = field(default=None)
    frames_a_step: int = 1

    def __str__(self) -> str:
        return self.name

    def model(self, attention: str) -> Any:
        return _model(self.name, attention)

    def batch(self, prompts: str) -> Batch:
        return dict(self.build_batch(self.prompts[prompts]))

    def row(self, prompts: str, row: int) -> Batch:
        """One prompt of a batch on its own: its padding taken away, its own pictures."""
        together = self.batch(prompts)
        real = together["attention_mask"][row].bool()
        tokens = {name: together[name][row : row + 1, real] for name in PER_TOKEN if name in together}
        if self.per_picture is None:
            raise ValueError(f"{self.name} does not say which pictures belong to a prompt")
        return {**tokens, **self.per_picture(self.prompts[prompts], together, row)}

    def extended(self, inputs: Batch, new: Tensor) -> Batch:
        """The same prompts with more tokens behind."""
        more = {"input_ids": new, "attention_mask": torch.ones_like(new), "mm_token_type_ids": torch.zeros_like(new)}
        return {name: torch.cat([x, more[name]], dim=1) if name in more else x for name, x in inputs.items()}


@cache
def _model(name: str, attention: str) -> Any:
    return next(kind for kind in (*FAMILIES, *VIDEOS, SMOLVLM) if kind.name == name).build(attention)


def _llava() -> Zoo:
    def batch(images: Any) -> Batch:
        return {name: x for name, x in common.batch(images).items() if name != "position_ids"}

    def pictures(prompts: Any, together: Batch, row: int) -> Batch:
        first = sum(prompts[:row])
        return {"pixel_values": together["pixel_values"][first : first + prompts[row]]}

    def one_picture(image: Image.Image) -> Batch:
        text = "user : <image> what shape assistant :"
        processor = llava_processor(grid=common.GRID)
        return dict(processor(images=image, text=text, return_tensors="pt", input_data_format="channels_last"))

    prompts = {"one": (1,), "padded": (1, 2)}
    return Zoo(
        "llava", lambda attention: common.small_llava(attention=attention), batch, prompts, (common.IMAGE,),
        one_picture, PATCH, per_picture=pictures,
    )  # fmt: skip


def _qwen(name: str) -> Zoo:
    prompts = {"one": (((4, 6),),), "padded": (((4, 6),), ((3, 2), (5, 4)))}
    return Zoo(
        name, lambda attention: qwen_models.qwen_model(name, attention=attention), qwen_models.qwen_batch, prompts,
        (qwen_models.IMAGE, qwen_models.VIDEO), qwen_models.one_picture,
        2 * qwen_models.PATCH, per_picture=_qwen_pictures,
    )  # fmt: skip


def _qwen_pictures(prompts: Any, together: Batch, row: int) -> Batch:
    """The pictures and videos of one prompt of a batch."""
    out = {}
    for kind, (values, grid) in qwen_models.INPUTS.items():
        counts = [sum((len(picture) > 2) == (kind == qwen_models.VIDEO) for picture in prompt) for prompt in prompts]
        first, grids = sum(counts[:row]), together.get(grid)
        if counts[row] and grids is not None:
            own = grids[first : first + counts[row]]
            start, size = int(grids[:first].prod(dim=1).sum()), int(own.prod(dim=1).sum())
            out |= {grid: own, values: together[values][start : start + size]}
    return out


def _qwen_video(name: str) -> Zoo:
    timed = name == "qwen3_vl"
    prompts = {"one": (((3, 2, 3),),), "padded": (((2, 2, 3), (2, 3)), ((3, 2), (2, 3, 2), (2, 4)))}
    return replace(
        _qwen(name), name=f"{name} video", build_batch=lambda sizes: qwen_models.qwen_batch(sizes, timed=timed),
        prompts=prompts, pixels="pixel_values_videos", frames_a_step=qwen_models.STEP,
        one_video=lambda frames: qwen_models.one_video(frames, timed=timed),
    )  # fmt: skip


def _anyres(name: str) -> Zoo:
    def pictures(prompts: Any, together: Batch, row: int) -> Batch:
        first = sum(len(prompt) for prompt in prompts[:row])
        own = slice(first, first + len(prompts[row]))
        out = {key: together[key][own] for key in ("pixel_values", "image_sizes")}
        if "batch_num_images" in together:
            out["batch_num_images"] = together["batch_num_images"][row : row + 1]
        return out

    prompts = {"one": (((30, 20),),), "padded": (((30, 20),), ((7, 60), (50, 50)))}
    return Zoo(
        name, lambda attention: anyres_models.anyres_model(name, attention=attention),
        lambda sizes: anyres_models.anyres_batch(name, sizes), prompts, (anyres_models.IMAGE, anyres_models.VIDEO),
        lambda image: anyres_models.one_picture(name, image), anyres_models.PATCH,
        resampled=name == "llava_onevision",
        per_picture=pictures,
    )  # fmt: skip


def _tiles(name: str) -> Zoo:
    def pictures(prompts: Any, together: Batch, row: int) -> Batch:
        if name != "internvl":  # prompts are padded to one number of tiles
            own = slice(0, int(together["pixel_attention_mask"][row].any(dim=(1, 2)).sum()))
            return {key: together[key][row : row + 1, own] for key in ("pixel_values", "pixel_attention_mask")}
        tiles = tile_models.tiles_of(together["input_ids"])
        first = sum(tiles[:row])
        return {"pixel_values": together["pixel_values"][first : first + tiles[row]]}

    prompts = {"one": (((30, 20),),), "padded": (((30, 20),), ((7, 60), (50, 50)))}
    return Zoo(
        name, lambda attention: tile_models.tile_model(name, attention=attention),
        lambda sizes: tile_models.tile_batch(name, sizes), prompts, (tile_models.IMAGE,),
        lambda image: tile_models.one_picture(name, image), tile_models.FOLD * tile_models.PATCH, per_picture=pictures,
        through=0 if name == "internvl" else tile_models.LONGEST,
    )  # fmt: skip


def _onevision_video() -> Zoo:
    def pictures(prompts: Any, together: Batch, row: int) -> Batch:
        images = [sum(size is not None for size in prompt) for prompt in prompts]
        films = [len(prompt) - count for prompt, count in zip(prompts, images, strict=True)]
        out = {}
        if films[row]:
            first = sum(films[:row])
            out["pixel_values_videos"] = together["pixel_values_videos"][first : first + films[row]]
        if images[row]:
            own = slice(sum(images[:row]), sum(images[: row + 1]))
            out |= {key: together[key][own] for key in ("pixel_values", "image_sizes")}
            alone = sum(count > 0 for count in images[:row])  # the numbers of prompts with pictures alone
            out |= {key: together[key][alone : alone + 1] for key in ("batch_num_images",) if key in together}
        return out

    return replace(
        _anyres("llava_onevision"), name="llava_onevision video", build_batch=anyres_models.video_batch,
        prompts={"one": ((None,),), "padded": ((None, (30, 20)), ((7, 60), None, (50, 50)))},
        pixels="pixel_values_videos", per_picture=pictures, one_video=anyres_models.one_video,
    )  # fmt: skip


def _video_llava() -> Zoo:
    picture, film = video_llava_models.PICTURE, video_llava_models.FILM

    def pictures(prompts: Any, together: Batch, row: int) -> Batch:
        out = {}
        for kind, key in ((picture, "pixel_values_images"), (film, "pixel_values_videos")):
            counts = [prompt.count(kind) for prompt in prompts]
            first = sum(counts[:row])
            out |= {key: together[key][first : first + counts[row]]} if counts[row] else {}
        return out

    return Zoo(
        "video_llava", lambda attention: video_llava_models.video_llava_model(attention=attention),
        video_llava_models.video_llava_batch,
        {"one": ((film,),), "padded": ((film, picture), (picture, film, picture))},
        (video_llava_models.IMAGE, video_llava_models.VIDEO), video_llava_models.one_picture, video_llava_models.PATCH,
        pixels="pixel_values_videos", per_picture=pictures, one_video=video_llava_models.one_video,
    )  # fmt: skip


FAMILIES = [
    _llava(),
    *(_anyres(name) for name in anyres_models.CLASSES),
    *(_qwen(name) for name in qwen_models.CLASSES),
    *(_tiles(name) for name in ("internvl", "idefics3")),
]
VIDEO_LLAVA = _video_llava()
VIDEOS = [  # with pictures between them
    *(_qwen_video(name) for name in qwen_models.CLASSES), VIDEO_LLAVA, _onevision_video(),
]  # fmt: skip
SMOLVLM = _tiles("smolvlm")  # Idefics3 under another name: not every test over again
