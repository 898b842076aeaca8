"""Gradients of the loss: of a batch, and of every task's memories at once."""

from gradmem.gradients.choice import METHODS
from gradmem.gradients.engine import MemoryGradients
from gradmem.gradients.flat import (
    gradient,
    loss_gradient,
    parameters,
    set_gradient,
)
from gradmem.memory.stack import Stack

__all__ = [
    "METHODS",
    "MemoryGradients",
    "Stack",
    "gradient",
    "loss_gradient",
    "parameters",
    "set_gradient",
]
