"""Training data of `mini`: pictures of the drawn world, questions about them, and what every patch shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dart_lab.mini.configs import MEAN, STD
from dart_lab.mini.network import Packed
from dart_lab.tasks import questions, scene

FAMILIES = ("exist", "attribute", "place")  # what it is taught: existence, naming, position
BEFORE, AFTER = "<|im_start|>user\n", "\n"  # around the picture
ASIDE = "<|im_end|>\n<|im_start|>assistant\n"  # between question and answer
END = "<|im_end|>"


def pixels_of(images: Sequence[Image.Image], side: int) -> Tensor:
    """(batch, 3, side, side), resized and normalised as the vision tower expects."""
    resized = [np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)) for image in images]
    values = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).float() / 255
    return (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def draw(
    rng: np.random.Generator, pictures: int, asked: int, window: int = scene.CANVAS
) -> list[tuple[scene.Scene, list[questions.Question]]]:
    """Fresh pictures, or windows of ``window`` pixels, with up to ``asked`` different questions each.

    Families take turns.
    """
    drawn = []
    for _ in range(pictures):
        picture = scene.compose(rng, window)
        found: dict[str, questions.Question] = {}
        for number in range(2 * asked):
            question = questions.ask(picture, FAMILIES[number % len(FAMILIES)], rng)
            if question is not None and len(found) < asked:
                found.setdefault(question.text, question)
        drawn.append((picture, list(found.values())))
    return drawn


def pack(tokenizer: Any, asked: Sequence[Sequence[questions.Question]]) -> Packed:
    """Tokens of the questions of every picture, one after the other."""
    before, after, aside, end = (_ids(tokenizer, text) for text in (BEFORE, AFTER, ASIDE, END))
    rows = []
    for own in asked:
        row = [(token, -1, place, -1) for place, token in enumerate(after)]
        for number, question in enumerate(own):
            prompt, answer = _ids(tokenizer, question.text) + aside, _ids(tokenizer, question.answer) + end
            tokens = prompt + answer
            target = [-1] * (len(prompt) - 1) + answer + [-1]
            places = range(len(after), len(after) + len(tokens))
            row += list(zip(tokens, [number] * len(tokens), places, target, strict=True))
        rows.append(row)
    longest = max(len(row) for row in rows)
    table = torch.tensor([row + [(0, -2, 0, -1)] * (longest - len(row)) for row in rows])
    return Packed(torch.tensor(before), *table.unbind(-1))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)
