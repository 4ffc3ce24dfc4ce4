"""How good `mini` is on held-out pictures: ``python -m dart_lab.mini.evaluate FOLDER --out JSON``.

An answer counts when greedy decoding would give it exactly. Questions are packed behind their picture, which gives the
same logits as asking one by one. Intervals are bootstrapped over pictures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from dart_lab.files import write_files
from dart_lab.mini import data
from dart_lab.mini.configs import GRID, SIDE
from dart_lab.mini.network import MiniNetwork
from dart_lab.mini.train import loss_of
from dart_lab.tasks import Sample, load_task
from dart_lab.tasks.questions import Question
from dart_lab.tiny.evaluate import blind_answers, by_picture, summary
from dart_lab.vlm.load import load

PICTURES, QUESTIONS = 150, 6  # held out, and questions about each
TASK_SEED = 91_001  # no training stream and no other default uses it
ALL, NONE = f"all {GRID**2}", "none"


def load_network(folder: Path) -> tuple[MiniNetwork, Any]:
    """The network of a folder that `get_mini` made, float32, and its tokenizer; its adapters are merged already."""
    from tokenizers import Tokenizer

    network = MiniNetwork(load(folder, dtype=torch.float32, device="cpu").model, torch.float32)
    with safe_open(folder / "model.safetensors", "pt") as file, torch.no_grad():
        for name, parameter in network.projector.named_parameters():
            parameter.copy_(file.get_tensor(f"multi_modal_projector.{name}"))
    return network.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def right_answers(
    network: MiniNetwork, tokenizer: Any, groups: Sequence[Sequence[Sample]]
) -> dict[str, list[list[bool]]]:
    """For every picture and question, whether the answer is exactly right, with all visual tokens and with none."""
    found: dict[str, list[list[bool]]] = {ALL: [], NONE: []}
    for group in tqdm(groups, disable=None, desc="pictures"):
        asked = [Question(s.family, s.question, s.answer, s.choices, ()) for s in group]
        packed = data.pack(tokenizer, [asked])
        features = network.look(data.pixels_of([group[0].image], SIDE))
        found[ALL] += loss_of(network, features, packed)[1]
        found[NONE] += loss_of(network, features[:, :0], packed)[1]
    return found


def evaluate(folder: Path, pictures: int = PICTURES) -> dict[str, Any]:
    """Everything that the model card states."""
    task = load_task(
        "shapes", n=QUESTIONS * pictures, seed=TASK_SEED, families=data.FAMILIES, questions_per_image=QUESTIONS
    )
    groups = by_picture(list(task))
    network, tokenizer = load_network(folder)
    right = right_answers(network, tokenizer, groups)
    return {
        "task": task.provenance(),
        "pictures": len(groups),
        "questions": len(task),
        "blind": summary(groups, blind_answers(groups, data.FAMILIES), data.FAMILIES),
        "conditions": {name: summary(groups, hits, data.FAMILIES) for name, hits in right.items()},
        "parameters": _parameters(folder),
        "trained": sum(parameter.numel() for parameter in network.parameters()),
    }


def history(before: dict[str, Any]) -> list[dict[str, float]]:
    """Accuracy with all tokens after every earlier run, from the evaluation of the last of them."""
    cells = before["conditions"][ALL]
    return [*before.get("history", []), {family: cells[family]["accuracy"] for family in data.FAMILIES}]


def _parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def main() -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(description="Measure mini on held-out pictures.")
    parser.add_argument("folder", type=Path, help="folder that dart-lab get mini made")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--pictures", type=int, default=PICTURES, help=f"held-out pictures (default {PICTURES})")
    parser.add_argument("--after", type=Path, metavar="JSON", help="evaluation after the run before, kept as history")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = evaluate(arguments.folder, arguments.pictures)
    if arguments.after is not None:
        result["history"] = history(json.loads(arguments.after.read_text(encoding="utf-8")))
    write_files({arguments.out: (json.dumps(result, indent=1) + "\n").encode()})


if __name__ == "__main__":
    main()
