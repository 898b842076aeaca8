"""G the plain way: one forward and one backward pass per task. Works for every network."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial

from torch import Tensor

from gradmem.gradients.flat import loss_gradient, parameters
from gradmem.gradients.objective import Objective
from gradmem.memory.stack import Stack
from gradmem.trees import Tree, take

__all__ = ["Pass", "batches_of", "loop_gradients", "pass_of", "task_losses"]

#: x, t, y and mask of one task.
Batch = tuple[Tree, Hashable, Tree, Tensor | None]
#: Writes the gradient of a batch's mean loss into out: (p,), and gives that loss: ().
Pass = Callable[[Objective, Batch, Tensor], Tensor]


def batches_of(stack: Stack) -> Iterator[Batch]:
    """The memories of each task as a batch, without the slots that are not filled."""
    for i in range(len(stack)):
        (one,) = stack[i : i + 1].level()
        mask = None if one.masks is None else one.masks[0]
        yield take(one.x, 0), one.tasks[0], take(one.y, 0), mask


def task_losses(objective: Objective, stack: Stack) -> Iterator[Callable[[], Tensor]]:
    """What computes the mean loss at the memories of each task."""
    for batch in batches_of(stack):
        yield partial(objective.loss, *batch)


def pass_of(objective: Objective, batch: Batch, out: Tensor, spared: int = 0) -> Tensor:
    """A forward and a backward pass, as they are."""
    loss = objective.loss(*batch, spared=spared)
    loss_gradient(loss, parameters(objective.network), out=out)
    return loss.detach()


def loop_gradients(
    objective: Objective, stack: Stack, out: Tensor, one_pass: Pass = pass_of
) -> list[Tensor]:
    """Write the gradient of each task's mean loss into its row of out: (k, p); the losses."""
    pairs = zip(batches_of(stack), out, strict=True)
    return [one_pass(objective, batch, row) for batch, row in pairs]
