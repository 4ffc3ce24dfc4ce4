"""A checkpoint's processor, also where there is no torchvision: then the family's own class, without its video part."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from dart_lab.errors import DartLabError
from dart_lab.vlm import compat
from dart_lab.vlm.hubfiles import read_json

_VIDEO = "video_processor"
#: A class that asks for more than pictures need → what it asks for, and a class that writes pictures alike.
_ALIKE = {"SmolVLMProcessor": ("num2words", "Idefics3Processor")}
#: Files that say how pictures are prepared; one of them is in every folder with a processor.
PICTURE_SETTINGS = ("processor_config.json", "preprocessor_config.json")
_NAMED_IN = (*PICTURE_SETTINGS, "tokenizer_config.json")


def load_processor(source: str, name: str, config: Any, options: Mapping[str, Any]) -> Any:
    """The processor of a checkpoint: pads on the left, has a padding token.

    A family whose processor also takes videos needs torchvision for them alone, SmolVLM's num2words too. Without these
    its class is built all the same, from the image processor that works with Pillow and the tokenizer, and takes
    pictures and text.

    Args:
        source: a folder, or a hub id.
        name: what to call the checkpoint in an error.
        config: the model's config.
        options: further arguments of `from_pretrained`: revision, trust_remote_code, local_files_only.

    Raises:
        DartLabError: the checkpoint has no processor for pictures and text.
    """
    import transformers
    from transformers.utils import is_torchvision_available

    named = _processor_name(source, config, options)
    asked, alike = _ALIKE.get(named, (None, None))
    complete = is_torchvision_available() and (asked is None or find_spec(asked) is not None)
    chosen = named if complete or alike is None else alike  # some releases cannot even import the class that is named
    kind = getattr(transformers, chosen, None)
    takes_videos = kind is not None and _VIDEO in inspect.signature(kind.__init__).parameters
    pictures = read_json(source, PICTURE_SETTINGS[1], options)
    hidden = compat.hidden_image_processor(pictures.get("image_processor_type", "")) is not None
    if chosen != named or hidden or (takes_videos and not complete):
        processor = _without_videos(kind, source, pictures, options)
    else:
        processor = transformers.AutoProcessor.from_pretrained(source, **options)
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or getattr(processor, "image_processor", None) is None:
        raise DartLabError(f"{name} has no processor for pictures and text; add it with processor.save_pretrained")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


class _NoVideos:
    """Put before a processor class: its video part may be missing, its image processor may be any."""

    image_processor_class = "AutoImageProcessor"

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == _VIDEO and argument is None:
            return None
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


def _without_videos(kind: Any, source: str, pictures: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """A processor of class `kind`, whose video processor is None if it has one; `pictures`: its image settings."""
    from transformers import AutoTokenizer

    made: Any = type(kind.__name__, (_NoVideos, kind), {"__module__": __name__, "__doc__": kind.__doc__})
    settings, _ = made.get_processor_dict(source, **options)
    parts = {
        "image_processor": compat.image_processor(source, pictures, options),
        "tokenizer": AutoTokenizer.from_pretrained(source, **options),
        _VIDEO: None,
    }
    order = [part for part in inspect.signature(kind.__init__).parameters if part in parts]
    return made.from_args_and_dict([parts[part] for part in order], settings)


def _processor_name(source: str, config: Any, options: Mapping[str, Any]) -> str:
    """The class that the checkpoint names, else the usual one of its model type; empty if there is neither."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    for file in _NAMED_IN:
        named = read_json(source, file, options).get("processor_class")
        if named:
            return str(named)
    known = type(config) in PROCESSOR_MAPPING  # a lazy mapping, whose `get` finds nothing
    return str(PROCESSOR_MAPPING[type(config)].__name__) if known else ""
