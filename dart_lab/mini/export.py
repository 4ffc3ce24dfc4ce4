"""Write what a run has trained as the file that the package ships: ``python -m dart_lab.mini.export RUN FILE``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dart_lab.files import write_files
from dart_lab.mini.train import CHECKPOINT

_VALUE = "value."  # how a checkpoint calls the parameters, beside the optimizer's moments


def trained(run: Path) -> dict[str, Tensor]:
    """Projector and adapters of a run's last checkpoint, rounded to float16."""
    held = load_file(run / CHECKPOINT)
    return {
        name.removeprefix(_VALUE): tensor.to(torch.float16) for name, tensor in held.items() if name.startswith(_VALUE)
    }


def main() -> None:
    """Command line of the export."""
    parser = argparse.ArgumentParser(description="Export the projector and the adapters of a training run of mini.")
    parser.add_argument("run", type=Path, help="folder of the training run")
    parser.add_argument("file", type=Path, help="safetensors file to write")
    arguments = parser.parse_args()
    write_files({arguments.file: save(trained(arguments.run), {"format": "pt"})})


if __name__ == "__main__":
    main()
