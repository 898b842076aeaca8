"""Networks of the paper's experiments, starting one afresh, and making one wider."""

from gradmem.networks.paper import ResNet18, mlp, reset_parameters, resnet18
from gradmem.networks.widen import fit_outputs, unwidened, widen

__all__ = ["ResNet18", "fit_outputs", "mlp", "reset_parameters", "resnet18", "unwidened", "widen"]
