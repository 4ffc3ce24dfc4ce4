"""From questions to prompts: the processor's chat template, or the family's plain form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dart_lab.errors import DartLabError
from dart_lab.vlm.families.base import Family

_IMAGE = "<image>"  # how the families' plain prompts write the place of an image


def build_prompts(processor: Any, family: Family, questions: Sequence[str], images: Sequence[int]) -> list[str]:
    """One prompt a question, with the images before the text.

    Args:
        processor: the model's processor; its chat template is used if it has one.
        family: gives the plain form otherwise.
        questions: `(batch,)` texts.
        images: `(batch,)` how many images belong to each question; 0 makes a text-only prompt.

    Raises:
        DartLabError: a question is not a text, is empty, or holds the image placeholder.
    """
    own = getattr(family, "placeholder", None)  # of a processor whose template takes plain texts alone
    placeholder = own or image_placeholder(processor)
    for number, question in enumerate(questions):
        check_question(question, placeholder, name=f"question {number}" if len(questions) > 1 else "the question")
    if own is None and getattr(processor, "chat_template", None):
        return [_from_template(processor, question, n) for question, n in zip(questions, images, strict=True)]
    return [_plain(family.prompt, placeholder, question, n) for question, n in zip(questions, images, strict=True)]


def prompt_template(processor: Any, family: Family) -> str:
    """The prompt of one image and one question, with `{question}` in the question's place, for records."""
    return build_prompts(processor, family, ["{question}"], [1])[0]


def image_placeholder(processor: Any) -> str:
    """The text that stands for an image in a prompt of this processor."""
    token = getattr(processor, "image_token", None) or _IMAGE
    return str(getattr(token, "content", token))


def check_question(question: object, placeholder: str = _IMAGE, *, name: str = "the question") -> None:
    """Raise `DartLabError` unless the question is a text with something in it and without the image placeholder."""
    if not isinstance(question, str):
        raise DartLabError(f"{name} is a {type(question).__name__}; give a text")
    if not question.strip():
        raise DartLabError(f"{name} is empty; ask something about the picture")
    if placeholder in question:
        raise DartLabError(f"{name} holds the image placeholder {placeholder!r}; leave it out, it is put in for you")


def _from_template(processor: Any, question: str, images: int) -> str:
    content = [{"type": "image"}] * images + [{"type": "text", "text": question}]
    message = [{"role": "user", "content": content}]
    return str(processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False))


def _plain(form: str, placeholder: str, question: str, images: int) -> str:
    """Repeat the form's image line for each image.

    >>> _plain("USER: <image>\\n{question} ASSISTANT:", "<image>", "why?", 2)
    'USER: <image>\\n<image>\\nwhy? ASSISTANT:'
    >>> _plain("USER: <image>\\n{question} ASSISTANT:", "<image>", "why?", 0)
    'USER: why? ASSISTANT:'
    """
    before, after = form.split(_IMAGE, 1)
    gap = after[: len(after) - len(after.lstrip())]
    return before + (placeholder + gap) * images + after[len(gap) :].replace("{question}", question)
