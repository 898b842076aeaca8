"""One input layer per task, everything after it shared."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from gradmem.learners.learner import Learner
from gradmem.learners.settings import Common
from gradmem.learners.states import load_weights
from gradmem.networks import reset_parameters
from gradmem.trees import Tree

__all__ = ["Multimodal"]


class Multimodal(Learner):
    """A predictor with a dedicated input layer per task, for tasks whose inputs differ in kind.

    The input layers are alike, so inputs have one shape in all tasks. A task that was never
    observed is predicted through the untrained input layer that the next new task will get.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, boundaries, average, glances,
    input_dropout, augment, not_finite, seed, graphs
        See `Learner`; `grow` is refused. The network is an `nn.Sequential`; its first layer becomes
        the pattern of the tasks' input layers, the rest is shared.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.Multimodal(gm.mlp([2, 8, 8, 2]))
    >>> for t in "ab":
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> list(learner.inputs)
    ['a', 'b']
    """

    shares_outputs = False
    one_network = averages_by_task = False

    def __init__(self, network: nn.Module, **common: Unpack[Common]) -> None:
        if not isinstance(network, nn.Sequential) or len(network) < 2:
            raise TypeError(
                "network must be an nn.Sequential of two or more layers, of which each task gets a "
                "first one for itself (Multimodal is for inputs of different kinds), got "
                f"{type(network).__name__}"
            )
        if not any(True for _ in network[0].parameters()):
            raise ValueError(f"network must begin with a layer that learns, got {network[0]!r}")
        super().__init__(network, **common)
        self.task: Hashable | None = None
        self.next_input = network[0]
        self.shared = network[1:]
        self.shared_optimizer = self.new_optimizer(self.shared)
        self.inputs: dict[Hashable, nn.Module] = {}
        self.input_optimizers: dict[Hashable, Optimizer] = {}

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        if t not in self.inputs:
            self._add(t)

        def step(x: Tree, y: Tree, mask: Tensor | None) -> tuple[Tensor]:
            optimizers = self.optimizers_of(t)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = self.loss(x, t, y, mask)
            loss.backward()
            self.descend(loss, *optimizers)
            return (loss.detach(),)

        self.task, self.network = t, self.module(t)
        return self.take(t, t, step, x, y, self.mask(t))

    def optimizers_of(self, t: Hashable) -> Sequence[Optimizer]:
        return (self.input_optimizers[t], self.shared_optimizer)

    def module(self, t: Hashable | None) -> nn.Module:
        return nn.Sequential(self.inputs.get(t, self.next_input), self.shared)

    def modules_by_task(self) -> dict[Hashable, nn.Module]:
        return {t: self.module(t) for t in self.inputs}

    def _add(self, t: Hashable) -> None:
        """An input layer for a new task; the one after it is drawn already."""
        layer, self.next_input = self.next_input, copy.deepcopy(self.next_input)
        reset_parameters(self.next_input)
        self.inputs = self.inputs | {t: layer}
        self.input_optimizers = self.input_optimizers | {t: self.new_optimizer(layer)}

    def get_state(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "shared": self.shared.state_dict(),
            "shared_optimizer": self.state_of(self.shared_optimizer),
            "next_input": self.next_input.state_dict(),
            "inputs": {t: layer.state_dict() for t, layer in self.inputs.items()},
            "input_optimizers": {t: self.state_of(o) for t, o in self.input_optimizers.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        load_weights(self.shared, state["shared"])
        self.load_state_of(self.shared_optimizer, state["shared_optimizer"])
        self.next_input.load_state_dict(state["next_input"])
        self.let_go(self.input_optimizers.values())
        self.inputs, self.input_optimizers = {}, {}
        for t, weights in state["inputs"].items():
            self.inputs[t] = copy.deepcopy(self.next_input)
            self.inputs[t].load_state_dict(weights)
            self.input_optimizers[t] = self.new_optimizer(self.inputs[t])
            self.load_state_of(self.input_optimizers[t], state["input_optimizers"][t])
        self.task = state["task"]
        self.network = self.module(self.task)
        self.graphed.forget()  # the layers are others now
