"""One input layer per task, everything after it shared."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradmem.learners.learner import Learner
from gradmem.networks import reset_parameters

__all__ = ["Multimodal"]


class Multimodal(Learner):
    """A predictor with a dedicated input layer per task, for tasks whose inputs differ in kind.

    The input layers are alike, so inputs have one shape in all tasks. A task that was never
    observed is predicted through the untrained input layer that the next new task will get.

    Parameters
    ----------
    network, lr, seed, graphs
        See `Learner`. The network is an `nn.Sequential`; its first layer becomes the pattern of
        the tasks' input layers, the rest is shared.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.Multimodal(gm.mlp([2, 8, 8, 2]))
    >>> for t in "ab":
    ...     learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> list(learner.inputs)
    ['a', 'b']
    """

    shares_outputs = False

    def __init__(
        self, network: nn.Module, lr: float = 0.1, seed: int = 0, graphs: bool = True
    ) -> None:
        if not isinstance(network, nn.Sequential) or len(network) < 2:
            raise TypeError(
                "network must be an nn.Sequential of two or more layers, of which each task gets a "
                "first one for itself (Multimodal is for inputs of different kinds), got "
                f"{type(network).__name__}"
            )
        if not any(True for _ in network[0].parameters()):
            raise ValueError(f"network must begin with a layer that learns, got {network[0]!r}")
        super().__init__(network, lr, seed, graphs)
        self.task: Hashable | None = None
        self.next_input = network[0]
        self.shared = network[1:]
        self.shared_optimiser = self.new_optimiser(self.shared)
        self.inputs: dict[Hashable, nn.Module] = {}
        self.input_optimisers: dict[Hashable, Optimizer] = {}

    def learn(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        if t not in self.inputs:
            self._add(t)
        optimisers = (self.input_optimisers[t], self.shared_optimiser)

        def step(x: Tensor, y: Tensor, mask: Tensor | None) -> None:
            for optimiser in optimisers:
                optimiser.zero_grad()
            self.loss(x, t, y, mask).backward()
            for optimiser in optimisers:
                optimiser.step()

        self.task, self.network = t, self.module(t)
        self.take(t, step, x, y, self.mask(t))

    def optimisers_in_use(self) -> Sequence[Optimizer]:
        return (*self.input_optimisers.values(), self.shared_optimiser)

    def module(self, t: Hashable | None) -> nn.Module:
        return nn.Sequential(self.inputs.get(t, self.next_input), self.shared)

    def _add(self, t: Hashable) -> None:
        """An input layer for a new task; the one after it is drawn already."""
        layer, self.next_input = self.next_input, copy.deepcopy(self.next_input)
        reset_parameters(self.next_input)
        self.inputs = self.inputs | {t: layer}
        self.input_optimisers = self.input_optimisers | {t: self.new_optimiser(layer)}

    def get_state(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "shared": self.shared.state_dict(),
            "shared_optimiser": self.shared_optimiser.state_dict(),
            "next_input": self.next_input.state_dict(),
            "inputs": {t: layer.state_dict() for t, layer in self.inputs.items()},
            "input_optimisers": {t: o.state_dict() for t, o in self.input_optimisers.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.shared.load_state_dict(state["shared"])
        self.shared_optimiser.load_state_dict(state["shared_optimiser"])
        self.next_input.load_state_dict(state["next_input"])
        self.inputs, self.input_optimisers = {}, {}
        for t, weights in state["inputs"].items():
            self.inputs[t] = copy.deepcopy(self.next_input)
            self.inputs[t].load_state_dict(weights)
            self.input_optimisers[t] = self.new_optimiser(self.inputs[t])
            self.input_optimisers[t].load_state_dict(state["input_optimisers"][t])
        self.task = state["task"]
        self.network = self.module(self.task)
        self.graphed.forget()  # the layers are others now
