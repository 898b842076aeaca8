"""Networks of the paper's experiments, and starting one afresh."""

from gradmem.networks.networks import ResNet18, mlp, reset_parameters, resnet18

__all__ = ["ResNet18", "mlp", "reset_parameters", "resnet18"]
