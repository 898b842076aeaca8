"""The small networks and tasks that learners are checked with."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from gradmem.networks import mlp

__all__ = [
    "N_CLASSES",
    "N_INPUTS",
    "Counting",
    "Doubling",
    "Joining",
    "Root",
    "dropout_network",
    "shared_modules",
    "task",
]

N_INPUTS, N_CLASSES = 4, 3


def shared_modules(first: nn.Module) -> nn.Module:
    """One PReLU in two places, and one block three times."""
    prelu, block = nn.PReLU(), nn.Linear(16, 16)
    linear, _, last = mlp([N_INPUTS, 16, N_CLASSES], seed=1)
    return nn.Sequential(first, linear, prelu, *nn.ModuleList([block] * 3), prelu, last)


class Counting(nn.Linear):
    """Replaces its buffer in every pass."""

    mean: Tensor

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.register_buffer("mean", torch.zeros(n_in))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x)


class Doubling(nn.Linear):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Root(nn.Linear):
    """Finite for an input of zeros, where its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return torch.where(x.any(1, keepdim=True), z, z + z.abs().sqrt())


class Joining(nn.Module):
    """A network whose input comes in two parts."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.network(torch.cat([x["left"], x["right"]], 1))  # type: ignore[no-any-return]


def dropout_network(seed: int = 1) -> nn.Module:
    first, relu, *rest = mlp([N_INPUTS, 16, 16, N_CLASSES], seed=seed)
    return nn.Sequential(first, relu, nn.Dropout(0.3), *rest)


def task(t: Hashable, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x: (n, 4), y: (n,): a cloud per class, moved a little by the task."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[2.0, 0, 0, 1], [-2, 1, 0, 0], [0, -2, 1, 0]])
    moved = centres.roll("abc".index(str(t)), dims=1)
    y = torch.randint(N_CLASSES, (n,), generator=generator)
    return moved[y] + 0.4 * torch.randn(n, N_INPUTS, generator=generator), y
