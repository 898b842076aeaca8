"""G the plain way: one forward and one backward pass per task. Works for every network."""

from __future__ import annotations

from torch import Tensor

from gradmem.gradients.flat import loss_gradient, parameters
from gradmem.gradients.objective import Objective
from gradmem.memory.stack import Stack
from gradmem.trees import take

__all__ = ["loop_gradients"]


def loop_gradients(objective: Objective, stack: Stack, out: Tensor) -> list[Tensor]:
    """Write the gradient of each task's mean loss into its row of out: (k, p); the losses."""
    weights = parameters(objective.network)
    losses = []
    for i, row in enumerate(out):
        (one,) = stack[i : i + 1].level()
        mask = None if one.masks is None else one.masks[0]
        loss = objective.loss(take(one.x, 0), one.tasks[0], take(one.y, 0), mask)
        loss_gradient(loss, weights, out=row)
        losses.append(loss.detach())
    return losses
