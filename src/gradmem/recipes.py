"""The paper's best settings for every learner and benchmark (Appendix A), and its networks."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from gradmem.learners import LEARNERS, Independent, Learner
from gradmem.networks import mlp
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
}

#: Hidden units of the paper's network for MNIST.
HIDDEN = 100


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
    allowed = setting_names(learner)
    for name, value in changes.items():
        if name not in allowed:
            raise ValueError(
                f"{learner} has no setting {name} (got {value!r}); it has {', '.join(allowed)}"
            )
    return RECIPES[benchmark].get(learner, {}) | changes


def build_network(learner: str, n_tasks: int, seed: int) -> nn.Module:
    """The paper's network for MNIST; independent ones share its hidden units out among tasks."""
    hidden = HIDDEN
    if issubclass(LEARNERS[learner], Independent):
        hidden = max(1, round(HIDDEN / n_tasks))
    return mlp([784, hidden, hidden, 10], seed=seed)


def build_learner(
    learner: str, settings: dict[str, Any], n_tasks: int, seed: int, device: str = "cpu"
) -> Learner:
    """A learner with its network, both from one seed."""
    kind = LEARNERS[one_of("learner", learner, LEARNERS)]
    return kind(build_network(learner, n_tasks, seed).to(device), **settings, seed=seed)
