"""Gradients of the loss as flat vectors: g for a batch, G for the whole episodic memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradmem.memory import EpisodicMemory

__all__ = ["flatten", "gradient", "memory_gradients", "parameters", "set_gradient"]


def parameters(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn; p counts their elements, in this order."""
    return [w for w in network.parameters() if w.requires_grad]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of any shapes as one vector: (p,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def gradient(network: nn.Module, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient g: (p,) of the mean loss on x: (n, …), y: (n,)."""
    return loss_gradient(F.cross_entropy(network(x), y), parameters(network), out)


def loss_gradient(
    loss: Tensor, weights: Sequence[nn.Parameter], out: Tensor | None = None
) -> Tensor:
    """The gradient (p,) of `loss`; zero for weights it does not depend on."""
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    flat = [
        (torch.zeros_like(w) if g is None else g).reshape(-1)
        for w, g in zip(weights, grads, strict=True)
    ]
    return torch.cat(flat, out=out) if out is not None else torch.cat(flat)


def memory_gradients(
    network: nn.Module, memory: EpisodicMemory, tasks: Sequence[Hashable]
) -> Tensor:
    """One row per task: the gradient of the mean loss on its memories (equation 5); G: (k, p)."""
    weights = parameters(network)
    G = weights[0].new_empty((len(tasks), sum(w.numel() for w in weights)))
    for row, t in zip(G, tasks, strict=True):
        gradient(network, *memory.stored(t), out=row)
    return G


def set_gradient(network: nn.Module, g: Tensor) -> None:
    """Make g: (p,) what the network's optimiser will step along."""
    weights = parameters(network)
    parts = torch.split(g, [w.numel() for w in weights])
    for w, part in zip(weights, parts, strict=True):
        w.grad = part.view_as(w)
