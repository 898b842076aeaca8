"""Passes that all processes go through at the same time, each with examples of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradmem.gradients import Objective
from gradmem.memory import Stack
from gradmem.trees import leaves, take

__all__ = ["loss_of_nothing", "part_of_loss", "unmoved"]


def part_of_loss(objective: Objective, one: Stack, share: float) -> Tensor:
    """The mean loss at a stack's one task, times what it counts in the mean of all: ()."""
    (filled,) = one.level()
    mask = None if filled.masks is None else filled.masks[0]
    x, y = take(filled.x, 0), take(filled.y, 0)
    return objective.loss(x, filled.tasks[0], y, mask) * share


def loss_of_nothing(objective: Objective, one: Stack, most: int) -> Tensor:
    """Zero, after a pass over at most so many examples of a stack's one task; it may be none."""
    (filled,) = one.level()
    outputs = objective.outputs(take(take(filled.x, 0), slice(most)))
    return torch.stack([leaf.sum() for leaf in leaves(outputs)]).sum() * 0.0


@contextmanager
def unmoved(network: nn.Module) -> Iterator[None]:
    """Put buffers back: what a pass did to running statistics is undone."""
    before = [(buffer, buffer.clone()) for buffer in network.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
