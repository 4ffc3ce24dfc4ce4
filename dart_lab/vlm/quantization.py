"""Weights in 4 or 8 bits while loading, through bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from dart_lab.errors import DartLabError, did_you_mean

QUANTIZATIONS = ("4bit", "8bit")


def check_quantization(quantization: str) -> None:
    """Raise `DartLabError` for an unknown kind, or if a package for it is missing."""
    if quantization not in QUANTIZATIONS:
        raise DartLabError(f"quantization={quantization!r} is not known. {did_you_mean(quantization, QUANTIZATIONS)}")
    for package in ("bitsandbytes", "accelerate"):
        if find_spec(package) is None:
            raise DartLabError(
                f"quantization={quantization!r} needs {package}, which is not installed; "
                "pip install 'dart-lab[quantization]'"
            )


def quantization_config(quantization: str, dtype: torch.dtype | None) -> Any:
    """What `from_pretrained` takes: 8-bit integers (LLM.int8, arXiv 2208.07339), or NF4 (QLoRA, arXiv 2305.14314).

    Args:
        quantization: "4bit" or "8bit".
        dtype: of the arithmetic and of everything that is not quantized. None: bfloat16.
    """
    from transformers import BitsAndBytesConfig

    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype or torch.bfloat16
    )
