"""The paper's best settings for every learner and benchmark (Appendix A), and its networks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from gradmem.learners import LEARNERS, Independent, Learner, Multimodal
from gradmem.networks import mlp, resnet18
from gradmem.validation import one_of

__all__ = ["RECIPES", "build_learner", "setting_names", "settings_for"]

#: Benchmark → learner → the settings behind the published numbers.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "mnist-rotations": {
        "single": {"lr": 0.003},
        "independent": {"lr": 0.1, "start": "copy"},
        "multimodal": {"lr": 0.1},
        "ewc": {"lr": 0.01, "regularization": 1000.0, "memories": 1000, "fisher": "batch"},
        "gem": {"lr": 0.1, "memories": 256, "margin": 0.5, "margin_rule": "shift"},
        "agem": {"lr": 0.1, "memories": 256, "sample": 256},  # not in the paper
    },
    "mnist-permutations": {
        "single": {"lr": 0.03},
        "independent": {"lr": 0.03, "start": "copy"},
        "multimodal": {"lr": 0.1},
        "ewc": {"lr": 0.1, "regularization": 3.0, "memories": 10, "fisher": "batch"},
        "gem": {"lr": 0.1, "memories": 256, "margin": 0.5, "margin_rule": "shift"},
        "agem": {"lr": 0.1, "memories": 256, "sample": 256},  # not in the paper
    },
    "cifar100-incremental": {
        "single": {"lr": 1.0},
        "independent": {"lr": 0.3, "start": "copy"},
        "ewc": {"lr": 1.0, "regularization": 1.0, "memories": 10, "fisher": "batch"},
        "icarl": {"lr": 1.0, "distillation": 1.0, "budget": 5120},
        "gem": {"lr": 0.1, "memories": 256, "margin": 0.5, "margin_rule": "shift"},
        "agem": {"lr": 0.1, "memories": 256, "sample": 256},  # not in the paper
    },
}

#: Hidden units of the paper's network for MNIST, and feature maps of the one for CIFAR-100.
HIDDEN, FEATURE_MAPS = 100, 20


def setting_names(learner: str) -> list[str]:
    """What may be set for a learner by name, beside its network and its seed."""
    accepted = inspect.signature(LEARNERS[one_of("learner", learner, LEARNERS)]).parameters
    return [name for name in accepted if name not in ("network", "seed")]


def settings_for(benchmark: str, learner: str, **changes: Any) -> dict[str, Any]:
    """The paper's settings, with the changes asked for.

    Examples
    --------
    >>> settings_for("mnist-permutations", "ewc", lr=0.01)
    {'lr': 0.01, 'regularization': 3.0, 'memories': 10, 'fisher': 'batch'}
    """
    one_of("benchmark", benchmark, RECIPES)
    one_of("learner", learner, LEARNERS)
    if benchmark.startswith("cifar") and issubclass(LEARNERS[learner], Multimodal):
        raise ValueError(
            f"{learner} is for tasks whose inputs differ in kind; {benchmark}'s are all images of "
            f"one kind. It has {', '.join(RECIPES[benchmark])}"
        )
    allowed = setting_names(learner)
    for name, value in changes.items():
        if name not in allowed:
            raise ValueError(
                f"{learner} has no setting {name} (got {value!r}); it has {', '.join(allowed)}"
            )
    return RECIPES[benchmark].get(learner, {}) | changes


def build_network(benchmark: str, learner: str, n_tasks: int, seed: int) -> nn.Module:
    """The paper's network; independent ones share its units or feature maps out among tasks."""
    shares = n_tasks if issubclass(LEARNERS[learner], Independent) else 1
    if benchmark.startswith("cifar"):
        return resnet18(100, max(1, round(FEATURE_MAPS / shares)), seed=seed)
    hidden = max(1, round(HIDDEN / shares))
    return mlp([784, hidden, hidden, 10], seed=seed)


def build_learner(
    benchmark: str,
    learner: str,
    settings: dict[str, Any],
    n_tasks: int,
    seed: int,
    device: str = "cpu",
) -> Learner:
    """A learner with the benchmark's network, both from one seed."""
    kind = LEARNERS[one_of("learner", learner, LEARNERS)]
    network = build_network(benchmark, learner, n_tasks, seed).to(device)
    widths = [part.out_channels for part in network.modules() if isinstance(part, nn.Conv2d)]
    if device.startswith("cuda") and widths and min(widths) > 1:
        # what convolutions there are made for
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return kind(network, **settings, seed=seed)
