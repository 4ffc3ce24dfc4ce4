"""A model whose roles are known: the colour of a patch says what its token is made into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import dart_lab as dl
from dart_lab.roles.fit import Fit, fit_rolebook
from dart_lab.roles.pool import Pool
from dart_lab.roles.rolebook import Rolebook
from dart_lab.vlm import compat
from tests.models import PATCH, SPECIAL, tiny_llava

GRID, WIDTH, LAYERS = 6, 32, 8
TOKENS = GRID * GRID
ALIVE, DEAD_A, DEAD_B, VIT, LLM, BOTH = range(6)  # codes; BOTH: a ViT sink that spikes in the language model too
STEP = 48  # of the red channel between codes
CHANNEL, SIGN = 5, 11  # the channel that spikes after layer 1, and the one by which it knows whom to spike
NORM = 100.0
FAMILIES = {"vit-sink": (VIT, BOTH), "llm-sink": (LLM,), "dead": (DEAD_A, DEAD_B), "alive": (ALIVE,)}


@dataclass(frozen=True)
class Plan:
    """How many tokens of each code every picture has; the rest is alive."""

    dead_a: int = 0
    dead_b: int = 0
    vit: int = 0
    llm: int = 0
    both: int = 0

    def codes(self, rng: np.random.Generator) -> np.ndarray:
        counts = {DEAD_A: self.dead_a, DEAD_B: self.dead_b, VIT: self.vit, LLM: self.llm, BOTH: self.both}
        codes = np.repeat(list(counts), list(counts.values()))
        return rng.permutation(np.pad(codes, (0, TOKENS - len(codes)), constant_values=ALIVE))

    def share(self, role: str) -> float:
        total = {VIT: self.vit, LLM: self.llm, BOTH: self.both, DEAD_A: self.dead_a, DEAD_B: self.dead_b}
        total[ALIVE] = TOKENS - sum(total.values())
        return sum(total[code] for code in FAMILIES[role]) / TOKENS


SIZE = 40  # pictures of a pool
# with 32 channels, a tenth of the energy is nothing
HOW = Fit(references=12, stored=2000, draws=200, alive_centroids=8, energy=0.5)
PLANS = {
    "none planted": Plan(),
    "everything dead": Plan(dead_a=TOKENS),
    "two kinds of dead": Plan(dead_a=8, dead_b=6),
    "one dead token": Plan(dead_a=1),
    "one ViT sink": Plan(vit=1),
    "one LLM sink": Plan(llm=1),
    "sinks of both kinds": Plan(vit=1, llm=2),
    "roles that overlap": Plan(both=1, llm=1, dead_a=10),
    "one token a group": Plan(vit=1, llm=1, dead_a=1),
    "everything planted": Plan(vit=1, llm=3, dead_a=20, dead_b=12),
}

def picture(codes: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """Red: the code; green and blue: this picture's own content, even within a patch."""
    patches = np.stack([codes * STEP, *rng.integers(0, 256, (2, TOKENS))], axis=-1).reshape(GRID, GRID, 3)
    return Image.fromarray(patches.repeat(PATCH, axis=0).repeat(PATCH, axis=1).astype(np.uint8))


def planted_pool(plan: Plan, size: int, seed: int = 0) -> tuple[Pool, list[np.ndarray]]:
    """Pictures after a plan, and the codes of their tokens."""
    rngs = [np.random.default_rng((seed, number)) for number in range(size)]
    codes = [plan.codes(rng) for rng in rngs]
    pictures = [picture(own, rng) for own, rng in zip(codes, rngs, strict=True)]
    return Pool("planted", size, pictures.__getitem__, {"seed": seed, "plan": repr(plan)}), codes


def planted_vlm(folder: Path) -> Any:
    """A small LLaVA, loaded by the real code, whose tower, projector and layer 1 do as the colours say."""
    vlm = dl.load(tiny_llava(folder / "planted", grid=GRID, layers=LAYERS, hidden=WIDTH))
    model, generator = vlm.model, torch.Generator().manual_seed(7)
    vectors = torch.randn(6, WIDTH, generator=generator)
    vectors[:, SIGN] = 0.0
    vectors[[LLM, BOTH], SIGN] = 30.0
    with torch.no_grad():
        model.get_input_embeddings().weight[:, SIGN] = 0.0
        model.get_input_embeddings().weight[SPECIAL.index("<bos>"), SIGN] = 30.0
    seen: dict[str, Tensor] = {}

    def read(module: Any, args: Any, kwargs: Any) -> None:
        pixels = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == 4)
        settings = vlm.processor.image_processor
        mean, std = torch.tensor(settings.image_mean), torch.tensor(settings.image_std)
        colours = pixels.float() * std[:, None, None] + mean[:, None, None]
        colours = colours.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).mean(dim=(-1, -2)).flatten(2) * 255
        seen["codes"] = (colours[:, 0] / STEP).round().long()
        seen["content"] = colours[:, 1:].mT.round()

    def loud(module: Any, args: Any, output: Any) -> Any:
        content = seen["content"][..., :1] + 1
        unit = torch.nn.functional.normalize(torch.sin(content * torch.arange(1, WIDTH + 1)), dim=-1)
        size = torch.where((seen["codes"] == VIT) | (seen["codes"] == BOTH), NORM, 1 + content[..., 0] / 256)
        features = torch.cat([torch.zeros(len(unit), 1, WIDTH), unit * size[..., None]], dim=1)
        output.hidden_states = tuple(features for _ in output.hidden_states)
        return output

    def emit(module: Any, args: Any, output: Tensor) -> Tensor:
        content = seen["content"].sum(dim=-1) + 512 * seen["content"][..., 0]
        spread = torch.sin(content[..., None].double() * 12.9898 + torch.arange(WIDTH) * 78.233) * 43758.5453
        own = (spread - spread.floor() - 0.5).float()  # as good as random, and the same for the same content
        own[..., SIGN] = 0.0
        codes = seen["codes"].reshape(output.shape[:-1])
        own = own.reshape(*output.shape[:-1], WIDTH)
        return torch.where((codes == ALIVE)[..., None], own, vectors[codes])

    def mark(module: Any, args: Any, kwargs: Any) -> None:
        seen["marked"] = (args[0] if args else kwargs["hidden_states"])[..., SIGN] > STRONG

    def spike(module: Any, args: Any, output: Any) -> Any:
        states = (output[0] if isinstance(output, tuple) else output).clone()
        states[..., CHANNEL] = torch.where(seen["marked"], SPIKE, states[..., CHANNEL])
        return (states, *output[1:]) if isinstance(output, tuple) else states

    tower = compat.vision_tower(model)
    assert tower is not None
    tower.register_forward_pre_hook(read, with_kwargs=True)
    tower.register_forward_hook(loud)
    compat.projector(model).register_forward_hook(emit)
    compat.text_model(model).layers[0].register_forward_pre_hook(mark, with_kwargs=True)
    compat.text_model(model).layers[1].register_forward_hook(spike)
    return vlm


STRONG, SPIKE = 15.0, 5000.0


def truth(codes: np.ndarray, role: str) -> np.ndarray:
    """`(n,)` bool: tokens whose primary role this is."""
    return np.isin(codes, FAMILIES[role])


def inputs_of(vlm: Any, pictures: Sequence[Image.Image]) -> Any:
    """Prepared inputs, one question a picture."""
    return vlm.prepare(list(pictures), ["what shape is the red circle ?"] * len(pictures))


def fitted(vlm: Any, plan: Plan, out: Path, **options: Any) -> Rolebook:
    """The rolebook of a pool after a plan."""
    return fit_rolebook(vlm, planted_pool(plan, SIZE)[0], out, how=HOW, **options)
