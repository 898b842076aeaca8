"""G the plain way: one forward and one backward pass per task. Works for every network."""

from __future__ import annotations

from torch import Tensor, nn

from gradmem.gradients.flat import loss_gradient, parameters
from gradmem.memory.stack import Stack

__all__ = ["loop_gradients"]


def loop_gradients(network: nn.Module, stack: Stack, out: Tensor) -> None:
    """Write the gradient of each task's mean loss into its row of out: (k, p)."""
    weights = parameters(network)
    for i, row in enumerate(out):
        (one,) = stack[i : i + 1].level()
        logits = network(one.x[0])
        loss_gradient(one.losses(logits[None]).sum(), weights, out=row)
