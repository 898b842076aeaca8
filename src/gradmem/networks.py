"""Networks of the paper's experiments, and starting one afresh."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from gradmem.validation import positive_int

__all__ = ["mlp", "reset_parameters"]


def mlp(sizes: Sequence[int] = (784, 100, 100, 10), seed: int = 0) -> nn.Sequential:
    """Fully connected layers with ReLU between them, Xavier-uniform weights and zero biases.

    Parameters
    ----------
    sizes
        Units of each layer, inputs and outputs included; the paper's for MNIST if left out.
    seed
        Of the weights; the global generator is left alone.

    Examples
    --------
    >>> mlp([784, 100, 100, 10])(torch.zeros(3, 784)).shape
    torch.Size([3, 10])
    """
    sizes = [positive_int("sizes", size) for size in sizes]
    if len(sizes) < 2:
        raise ValueError(f"sizes must hold at least inputs and outputs, got {sizes}")
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for n_in, n_out in itertools.pairwise(sizes):
            layers += [XavierLinear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class XavierLinear(nn.Linear):
    """A linear layer that starts with Xavier-uniform weights and a zero bias."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def reset_parameters(module: nn.Module) -> nn.Module:
    """`module` with new random weights from the global generator, as its layers draw them."""
    for name, part in module.named_modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
        elif any(True for _ in part.parameters(recurse=False)):
            raise ValueError(
                f"{type(part).__name__} ({name or 'the network'}) has parameters but no "
                "reset_parameters(): give it one so that it can start afresh"
            )
    return module
