"""A model with its processor: pictures and questions in, answers out, and where it all came from."""

from __future__ import annotations

import hashlib
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dart_lab.errors import DartLabError, DartLabWarning
from dart_lab.vlm import compat
from dart_lab.vlm.families import Family
from dart_lab.vlm.families.minicpm import marked_ids
from dart_lab.vlm.images import check_aspect, open_image, to_rgb
from dart_lab.vlm.locate import layout
from dart_lab.vlm.prompts import build_prompts, prompt_template

if TYPE_CHECKING:
    from PIL.Image import Image

    Picture = Image | str | Path

_SMALLEST_SIDE = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class VLM:
    """What `load` returns.

    Attributes:
        model: the Hugging Face model object, in evaluation mode.
        processor: its processor; pads on the left.
        name: as given to `load`.
        family: the adapter of its model family.
        folder: where its files lie; None if that is unknown.
        base: where the files of the model under an adapter lie; None for a whole model.
    """

    model: Any
    processor: Any
    name: str
    family: Family
    folder: Path | None = None
    base: Path | None = None

    def prepare(self, images: Sequence[Picture | Sequence[Picture] | None], questions: Sequence[str]) -> Any:
        """The model's inputs for a batch: `input_ids`, `attention_mask` `(batch, sequence)`, pictures; left padded.

        Args:
            images: one entry a question: a picture (Pillow image or path), a list of pictures, or None for no picture.
            questions: `(batch,)` texts; each goes into the chat template, or the family's plain prompt.

        Returns:
            A `BatchFeature` on the model's device, ready for `model(**inputs)` and `model.generate(**inputs)`.

        Raises:
            DartLabError: no questions, lengths that differ, an empty question, something that is not a picture, or a
                prompt whose image span was cut.
        """
        return self._inputs(images, questions, 0)

    def _inputs(self, images: Sequence[Any], questions: Sequence[str], first: int) -> Any:
        """As `prepare`; messages count the questions from `first` on."""
        pictures = self._pictures(images, questions, first)
        prompts = build_prompts(self.processor, self.family, questions, [len(own) for own in pictures])
        bos = self.processor.tokenizer.bos_token
        whole = bos is not None and all(prompt.startswith(bos) for prompt in prompts)
        options: dict[str, Any] = {"padding_side": "left", "add_special_tokens": not whole}
        if not compat.passes_options_on(self.processor):  # its tokenizer pads and begins the prompt as it is set to
            self.processor.tokenizer.padding_side, options = "left", {}
            prompts = [prompt.removeprefix(bos or "") for prompt in prompts]
        try:
            inputs = self.processor(
                images=pictures if any(pictures) else None, text=prompts, return_tensors="pt", padding=True, **options
            )
        except (ValueError, TypeError) as error:  # TypeError: a release whose processor takes no such argument
            raise DartLabError(f"the processor refused the batch ({' '.join(str(error).split())[:300]})") from error
        if "token_type_ids" not in signature(type(self.model).forward).parameters:
            inputs.pop("token_type_ids", None)  # of tokenizers made for BERT's kind of model; generate refuses it
        taken = own_generate(self.model)
        for name in [name for name in inputs if taken and name not in taken]:
            inputs.pop(name)
        self._check_whole(inputs, pictures, first)
        return inputs.to(self.model.device, dtype=self.model.dtype)

    def ask(
        self, images: Sequence[Picture | Sequence[Picture] | None], questions: Sequence[str], *,
        max_new_tokens: int = 32, batch_size: int = 8,
    ) -> list[str]:
        """Answer each question about its picture, greedily.

        Args:
            images: as in `prepare`.
            questions: as in `prepare`.
            max_new_tokens: length at which an answer is cut. Default 32.
            batch_size: questions in one pass. Default 8.

        Returns:
            One answer a question.

        Raises:
            DartLabError: as `prepare`.
        """
        _check_lengths(images, questions)
        answers: list[str] = []
        for start in range(0, len(questions), batch_size):
            batch = slice(start, start + batch_size)
            answers += self.answers(self._inputs(images[batch], questions[batch], start), max_new_tokens=max_new_tokens)
        return answers

    def answers(self, inputs: Mapping[str, Any], *, max_new_tokens: int = 32) -> list[str]:
        """Generate from prepared inputs, greedily, and decode what is new.

        Raises:
            DartLabError: right padding, after which a model continues from padding instead of the prompt.
        """
        check_left_padding(inputs)
        tokenizer, own = self.processor.tokenizer, own_generate(self.model)
        needed = {"tokenizer": tokenizer} if own else {"pad_token_id": tokenizer.pad_token_id}
        with torch.inference_mode():
            out = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **needed)
        return self.words(out if own else out[:, inputs["input_ids"].shape[1] :])

    def words(self, tokens: Any) -> list[str]:
        """Generated token ids `(batch, new)` as texts, without special tokens."""
        return [text.strip() for text in self.processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def provenance(self) -> dict[str, Any]:
        """Where numbers of this model come from, as plain JSON values.

        Keys: model, model_type, revision (commit of a hub model), weights_sha256, parameters, dtype, device, attention
        (the kernel that the text model really uses), vision_attention, prompt, versions.
        """
        import transformers

        import dart_lab

        tower = compat.vision_tower(self.model)
        return {
            "model": self.folder.resolve().name if self.folder == Path(self.name).expanduser() else self.name,
            "model_type": str(self.model.config.model_type),
            "revision": self._commit(),
            "weights_sha256": self.weights_sha256,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "attention": compat.backend_of(compat.text_model(self.model)),
            "vision_attention": None if tower is None else compat.backend_of(tower),
            "prompt": prompt_template(self.processor, self.family),
            "versions": {
                "dart_lab": dart_lab.__version__, "transformers": transformers.__version__, "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def _commit(self) -> str | None:
        """The commit of a hub model: the name of its snapshot's folder in the cache."""
        if self.folder is not None and self.folder.parent.name == "snapshots":
            return self.folder.name
        return getattr(self.model.config, "_commit_hash", None)

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(compat.text_model(self.model).layers)

    @property
    def feature_blocks(self) -> int | None:
        """Vision blocks that the features pass through; None where they come from several or cannot be told."""
        tower, feature = compat.vision_tower(self.model), getattr(self.model.config, "vision_feature_layer", None)
        if tower is None or not isinstance(feature, int):
            return None
        return len(compat.vision_blocks(tower)) + feature + 1 if feature < 0 else feature

    @cached_property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights file; of the sorted list of their hashes where there are several; None if unknown."""
        places = (self.folder, self.base)
        files = [file for place in places if place is not None for file in sorted(place.glob("*.safetensors"))]
        hashes = [_sha256(file) for file in files]
        if len(hashes) < 2:
            return hashes[0] if hashes else None
        return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()

    def _pictures(self, images: Sequence[Any], questions: Sequence[str], first: int) -> list[list[Image]]:
        _check_lengths(images, questions)
        out = []
        for number, entry in enumerate(images, start=first):
            own = _as_list(entry)
            several = len(own) > 1
            names = [f"{place} of question {number}" if several else str(number) for place in range(len(own))]
            out.append([_picture(one, f"picture {name}") for one, name in zip(own, names, strict=True)])
        return out

    def _check_whole(self, inputs: Mapping[str, Any], pictures: list[list[Image]], first: int) -> None:
        visual = self.family.visual_mask(self.model, marked_ids(inputs)).any(dim=1).tolist()
        found = [int(present) for present in visual]
        if all(visual):
            found = [int(sample.image.max()) + 1 for sample in layout(self.model, inputs).samples]
        for number, (given, own) in enumerate(zip(found, pictures, strict=True), start=first):
            if given != len(own) and (all(visual) or not (given and own)):
                raise DartLabError(
                    f"question {number} has {len(own)} pictures but its prompt holds {given}: the processor cut it; "
                    "shorten the question or give fewer pictures"
                )
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        length = inputs["input_ids"].shape[1]
        if limit is not None and length > limit:
            warnings.warn(
                f"the prompt has {length} tokens, the model was made for {limit}; shorten it or give fewer pictures",
                DartLabWarning, stacklevel=3,
            )


def own_generate(model: Any) -> set[str]:
    """What `generate` of a model of its authors' code takes, which wants the tokenizer and returns new tokens alone;
    empty for transformers' own.
    """
    taken = set(signature(model.generate).parameters)
    return taken if "tokenizer" in taken else set()


def check_left_padding(inputs: Mapping[str, Any]) -> None:
    """Raise `DartLabError` if a row of `attention_mask` `(batch, sequence)` ends in padding."""
    mask: Tensor | None = inputs.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not bool(mask[:, -1].bool().all()):
        raise DartLabError(
            "the batch is padded on the right, where generation would continue from padding; "
            "set processor.tokenizer.padding_side = 'left' and prepare it again"
        )


def _check_lengths(images: Sequence[Any], questions: Sequence[str]) -> None:
    for name, given in (("images", images), ("questions", questions)):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise DartLabError(f"{name} is a {type(given).__name__}; give a list with one entry a question")
    if not questions:
        raise DartLabError("there are no questions; give at least one")
    if len(images) != len(questions):
        raise DartLabError(f"{len(images)} images but {len(questions)} questions; give one entry of images a question")


def _as_list(entry: Any) -> list[Any]:
    if entry is None:
        return []
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def _picture(given: Any, name: str) -> Image:
    from PIL import Image

    if isinstance(given, (str, Path)):
        picture = open_image(given)
        name = str(given)
    elif isinstance(given, Image.Image):
        picture = to_rgb(given, name=name)
    else:
        raise DartLabError(f"{name} is a {type(given).__name__}; give a Pillow image or the path of a picture")
    check_aspect(picture, name=name)
    if min(picture.size) < _SMALLEST_SIDE:  # older processors take a side of 1 or 3 pixels for the colour channels
        larger = (picture.width * _SMALLEST_SIDE, picture.height * _SMALLEST_SIDE)
        picture = picture.resize(larger, Image.Resampling.NEAREST)
    return picture


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
