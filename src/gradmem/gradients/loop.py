"""G the plain way: one forward and one backward pass per task. Works for every network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from gradmem.gradients.flat import loss_gradient, parameters
from gradmem.gradients.objective import Objective
from gradmem.memory.stack import Stack
from gradmem.trees import take

__all__ = ["loop_gradients", "task_losses"]


def task_losses(objective: Objective, stack: Stack) -> Iterator[Callable[[], Tensor]]:
    """What computes the mean loss at the memories of each task."""
    for i in range(len(stack)):
        (one,) = stack[i : i + 1].level()
        yield partial(_loss, objective, one)


def _loss(objective: Objective, one: Stack) -> Tensor:
    mask = None if one.masks is None else one.masks[0]
    return objective.loss(take(one.x, 0), one.tasks[0], take(one.y, 0), mask)


def loop_gradients(objective: Objective, stack: Stack, out: Tensor) -> list[Tensor]:
    """Write the gradient of each task's mean loss into its row of out: (k, p); the losses."""
    weights = parameters(objective.network)
    losses = []
    for compute, row in zip(task_losses(objective, stack), out, strict=True):
        loss = compute()
        loss_gradient(loss, weights, out=row)
        losses.append(loss.detach())
    return losses
