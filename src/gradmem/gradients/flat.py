"""Gradients as flat vectors: (p,) over all parameters that learn, in the network's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "gradient",
    "loss_gradient",
    "parameters",
    "rows_by_parameter",
    "set_gradient",
]


def parameters(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn; p counts their elements, in this order."""
    return [w for w in network.parameters() if w.requires_grad]


def loss_gradient(
    loss: Tensor, weights: Sequence[nn.Parameter], out: Tensor | None = None
) -> Tensor:
    """The gradient (p,) of `loss`; zero for weights it does not depend on."""
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    flat = [
        (torch.zeros_like(w) if g is None else g).reshape(-1)
        for w, g in zip(weights, grads, strict=True)
    ]
    return torch.cat(flat) if out is None else torch.cat(flat, out=out)


def gradient(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient g: (p,) of the mean loss on x: (n, …), y: (n,)."""
    return loss_gradient(F.cross_entropy(network(x), y), parameters(network))


def set_gradient(network: nn.Module, g: Tensor) -> None:
    """Make g: (p,) what the network's optimiser will step along."""
    weights = parameters(network)
    parts = torch.split(g, [w.numel() for w in weights])
    for w, part in zip(weights, parts, strict=True):
        w.grad = part.view_as(w)


def rows_by_parameter(G: Tensor, weights: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Views of G: (k, p), one per parameter: (k, *shape)."""
    rows, start = {}, 0
    for w in weights:
        rows[w] = G[:, start : start + w.numel()].unflatten(1, w.shape)
        start += w.numel()
    return rows
