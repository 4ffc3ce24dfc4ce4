"""One golden case: its record, its inputs (stored, or rebuilt from the recipe) and its expected outputs."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

DERIVED = re.compile(r"\(?(?P<table>\w+)\[(?P<index>\w+)\] \+ (?P<weight>[\d.]+)\*(?P<noise>\w+)(?P<first>\[0\])?")


@dataclass(frozen=True)
class Case:
    """A `<case>.json` with its `<case>.safetensors`."""

    path: Path

    @cached_property
    def record(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def params(self) -> dict[str, Any]:
        return self.record["params"]

    @property
    def function(self) -> str:
        """Which official function made the case."""
        return self.record["official"]["function"]

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return load_file(self.path.with_suffix(".safetensors"))

    @cached_property
    def outputs(self) -> dict[str, Any]:
        """Expected outputs, tensors loaded."""
        return {
            name: self._tensors[value["tensor"]] if isinstance(value, dict) and "tensor" in value else value
            for name, value in self.record["outputs"].items()
        }

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Input tensors, each checked against its recorded hash."""
        drawn = draw(self.record["recipe"]) if self.record.get("recipe") else {}
        rules = self.record.get("derived_inputs") or {}
        found = {}
        for name, about in self.record["inputs"].items():
            if f"in.{name}" in self._tensors:
                found[name] = self._tensors[f"in.{name}"]
            else:
                found[name] = derive(rules[name], drawn) if name in rules else drawn[name]
            digest = hashlib.sha256(found[name].contiguous().numpy().tobytes()).hexdigest()
            assert digest == about["sha256"], f"{self.path.name}: input {name} is not the recorded one"
        return found

    def model(self, name: str) -> Path:
        """Folder of a model that the case names, looked for beside the method folders."""
        return self.path.parent.parent / name


def draw(recipe: dict[str, Any]) -> dict[str, Tensor]:
    """Repeat the recipe's draws, in order, from one generator. Integers only, so exact everywhere."""
    generator = torch.Generator().manual_seed(recipe["seed"])

    def integers(high: int, shape: list[int]) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    out = {}
    for call in recipe["calls_in_order"]:
        shape = call["shape"]
        if call["op"] == "ih":  # sum of four uniform draws
            out[call["name"]] = (integers(1 << 16, [4, *shape]).sum(dim=0) - 131070).float() / 32768
        elif call["op"] == "u":
            out[call["name"]] = (integers(1 << 24, shape) + 1).float() / (1 << 24)
        elif call["op"] == "ints":
            out[call["name"]] = integers(call["hi"], shape)
        elif call["op"] == "perm":
            rows = torch.Size(shape[:-1]).numel()
            drawn = [torch.randperm(shape[-1], generator=generator) for _ in range(rows)]
            out[call["name"]] = (torch.stack(drawn).reshape(shape).float() + 1) / (1 << 14)
        else:
            raise AssertionError(f"the recipe has an unknown draw {call['op']!r}")
    return out


def derive(rule: str, drawn: dict[str, Tensor]) -> Tensor:
    """Apply a rule of the form `table[index] + 0.25*noise[0]`; the leading axis that `[0]` takes off is put back."""
    match = DERIVED.match(rule)
    assert match, f"the rule {rule!r} is not understood"
    noise = drawn[match["noise"]][0] if match["first"] else drawn[match["noise"]]
    value = drawn[match["table"]][drawn[match["index"]]] + float(match["weight"]) * noise
    return value[None] if match["first"] else value
