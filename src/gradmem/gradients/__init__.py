"""Gradients of the loss: of a batch, and of every task's memories at once."""

from gradmem.gradients.choice import METHODS
from gradmem.gradients.engine import MemoryGradients
from gradmem.gradients.examples import attach, evaluating, with_last_inputs
from gradmem.gradients.flat import gradient, loss_gradient, parameters, set_gradient
from gradmem.gradients.gram import Gradients, GramGradients, longest
from gradmem.gradients.inputs import Inputs
from gradmem.gradients.loss import Criterion, Loss, masked
from gradmem.gradients.most_violated import most_violated
from gradmem.gradients.noise import noise_of
from gradmem.gradients.objective import Forward, Objective, Transform

__all__ = [
    "METHODS",
    "Criterion",
    "Forward",
    "Gradients",
    "GramGradients",
    "Inputs",
    "Loss",
    "MemoryGradients",
    "Objective",
    "Transform",
    "attach",
    "evaluating",
    "gradient",
    "longest",
    "loss_gradient",
    "masked",
    "most_violated",
    "noise_of",
    "parameters",
    "set_gradient",
    "with_last_inputs",
]
