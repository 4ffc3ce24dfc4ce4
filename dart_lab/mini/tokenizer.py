"""The language model's tokenizer, from the metadata of its GGUF file to the hub's ``tokenizer.json``."""

from __future__ import annotations

from typing import Any

from dart_lab.errors import DartLabError
from dart_lab.mini.configs import IMAGE_ID, IMAGE_TOKEN

_SPECIAL = 3  # GGUF's type of control tokens
_KIND = ("gpt2", "smollm")  # byte-level BPE, split as SmolLM does


def build_tokenizer(metadata: dict[str, Any]) -> Any:
    """A `tokenizers.Tokenizer`; the reserved token of number ``IMAGE_ID`` becomes the image's placeholder.

    Raises:
        DartLabError: the metadata describes another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != _KIND:
        raise DartLabError(f"the GGUF file's tokenizer is {kind}, not {_KIND}; fetch it again")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[IMAGE_ID] = IMAGE_TOKEN
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
               if kind == _SPECIAL]  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
