"""Networks of the paper's experiments, and ways to reset, widen and condition a network."""

from gradmem.networks.conditioned import Conditioned, conditioned
from gradmem.networks.paper import ResNet18, mlp, reset_parameters, resnet18
from gradmem.networks.widen import fit_outputs, unwidened, widen

__all__ = [
    "Conditioned",
    "ResNet18",
    "conditioned",
    "fit_outputs",
    "mlp",
    "reset_parameters",
    "resnet18",
    "unwidened",
    "widen",
]
