"""Gradients as flat vectors: (p,) over all parameters that learn, in the network's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "flat",
    "gradient",
    "loss_gradient",
    "parameters",
    "rows_by_parameter",
    "set_gradient",
    "split",
]


def parameters(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn; p counts their elements, in this order."""
    return [w for w in network.parameters() if w.requires_grad]


def flat(
    parts: Sequence[Tensor | None], weights: Sequence[Tensor], out: Tensor | None = None
) -> Tensor:
    """One vector (p,) of tensors shaped as the weights; zero where there is none."""
    pairs = zip(weights, parts, strict=True)
    rows = [(torch.zeros_like(w) if part is None else part).reshape(-1) for w, part in pairs]
    return torch.cat(rows) if out is None else torch.cat(rows, out=out)


def split(vector: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector (p,), shaped as the weights."""
    parts = torch.split(vector, [w.numel() for w in weights])
    return [part.view_as(w) for w, part in zip(weights, parts, strict=True)]


def loss_gradient(
    loss: Tensor, weights: Sequence[nn.Parameter], out: Tensor | None = None
) -> Tensor:
    """The gradient (p,) of `loss`; zero for weights it does not depend on."""
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return flat(grads, weights, out)


def gradient(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient g: (p,) of the mean cross-entropy on x: (n, …), y: (n,)."""
    return loss_gradient(F.cross_entropy(network(x), y), parameters(network))


def set_gradient(network: nn.Module, g: Tensor) -> None:
    """Make g: (p,) what the network's optimizer will step along.

    Gradients are views of g, or copies that lie in memory as their parameter does.
    """
    weights = parameters(network)
    for w, part in zip(weights, split(g, weights), strict=True):
        w.grad = part if part.stride() == w.stride() else torch.empty_like(w).copy_(part)


def rows_by_parameter(G: Tensor, weights: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Views of G: (k, p), one per parameter: (k, *shape)."""
    rows, start = {}, 0
    for w in weights:
        rows[w] = G[:, start : start + w.numel()].unflatten(1, w.shape)
        start += w.numel()
    return rows
