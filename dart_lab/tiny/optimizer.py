"""Muon for the matrices of the layers, AdamW for everything else, on one flat buffer of parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOMENTUM = 0.95  # Muon
BETAS = (0.9, 0.98)  # AdamW
EPS = 1e-8
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
UPDATE_RMS = 0.2  # root mean square of a Muon update over the learning rate, that of a usual AdamW update
MATRICES = ("_proj.weight", "fc1.weight", "fc2.weight", "linear_1.weight", "linear_2.weight")


def orthogonalise(stack: Tensor) -> Tensor:
    """Nearly orthogonal matrices with the singular vectors of ``stack`` (matrices, rows, columns).

    Newton-Schulz steps of Muon (K. Jordan et al., 2024) in bfloat16; singular values come out between 0.7 and 1.2.

    >>> torch.linalg.svdvals(orthogonalise(torch.diag(torch.tensor([4.0, 2.0, 1.0]))[None])).amin().item() > 0.6
    True
    """
    a, b, c = NEWTON_SCHULZ
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class FlatOptimizer:
    """Owns the parameters of ``modules`` as one flat tensor; ``state`` holds all that a resumed run needs."""

    def __init__(self, module: nn.Module, weight_decay: float, clip: float) -> None:
        named = list(module.named_parameters())
        named.sort(key=lambda pair: (not pair[0].endswith(MATRICES), pair[0].split(".")[0], tuple(pair[1].shape)))
        self.weight_decay, self.clip = weight_decay, clip
        size = sum(parameter.numel() for _, parameter in named)
        self.flat, self.grad = torch.empty(size), torch.zeros(size)
        self.first, self.second = torch.zeros(size), torch.zeros(size)
        self.stacks: list[tuple[int, int, tuple[int, int, int]]] = []
        start, part = 0, ""
        for name, parameter in named:
            end = start + parameter.numel()
            self.flat[start:end] = parameter.data.flatten()
            parameter.data = self.flat[start:end].view(parameter.shape)
            parameter.grad = self.grad[start:end].view(parameter.shape)
            if name.endswith(MATRICES):
                rows, columns = parameter.shape
                if part == name.split(".")[0] and self.stacks[-1][2][1:] == (rows, columns):
                    first, _, (count, _, _) = self.stacks.pop()
                    self.stacks.append((first, end, (count + 1, rows, columns)))
                else:
                    self.stacks.append((start, end, (1, rows, columns)))
                part = name.split(".")[0]
            start = end
        self.muon_end = self.stacks[-1][1]

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and both moments, flat."""
        return {"flat": self.flat, "first": self.first, "second": self.second}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from ``state``."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def step(self, number: int, lr: float) -> float:
        """Update number ``number``, from 1, with the gradient in ``grad``; clears it and returns its norm."""
        norm = self.grad.norm()
        self.grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1.0))
        self.flat.mul_(1 - lr * self.weight_decay)
        m = self.muon_end
        self.first[:m].mul_(MOMENTUM).add_(self.grad[:m])
        ahead = self.grad[:m] + MOMENTUM * self.first[:m]
        for start, end, (count, rows, columns) in self.stacks:
            if not ahead[start:end].any():  # a part of the network that is not trained yet
                continue
            update = orthogonalise(ahead[start:end].view(count, rows, columns))
            self.flat[start:end].sub_(update.flatten(), alpha=lr * UPDATE_RMS * max(rows, columns) ** 0.5)
        g, first, second = self.grad[m:], self.first[m:], self.second[m:]
        first.lerp_(g, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        scale = (second / (1 - BETAS[1] ** number)).sqrt_().add_(EPS)
        self.flat[m:].addcdiv_(first, scale, value=-lr / (1 - BETAS[0] ** number))
        self.grad.zero_()
        return float(norm)
