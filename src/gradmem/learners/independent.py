"""One network per task."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradmem.learners.learner import Learner
from gradmem.networks import reset_parameters
from gradmem.validation import one_of

__all__ = ["Independent"]


class Independent(Learner):
    """One independent predictor per task.

    In the paper each has T times fewer hidden units than the other learners' network. A task that
    was never observed is predicted by the network as it was given, untrained.

    Parameters
    ----------
    network, lr, seed, graphs
        See `Learner`. The network is the pattern of all others and is not trained itself.
    start
        What a new task's network starts from: "copy" of the one trained last, or "random" weights.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.Independent(gm.mlp([2, 8, 2]), start="random")
    >>> for t in "ab":
    ...     learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> list(learner.networks)
    ['a', 'b']
    """

    shares_outputs = False
    STARTS = ("copy", "random")

    def __init__(
        self,
        network: nn.Module,
        lr: float = 0.1,
        start: str = "copy",
        seed: int = 0,
        graphs: bool = True,
    ) -> None:
        super().__init__(network, lr, seed, graphs)
        self.start = one_of("start", start, self.STARTS)
        self.task: Hashable | None = None
        self.pattern = copy.deepcopy(network)
        self.networks: dict[Hashable, nn.Module] = {}
        self.optimisers: dict[Hashable, Optimizer] = {}

    def learn(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        if t not in self.networks:
            self._add(t)
        self.task, self.network, self.optimiser = t, self.networks[t], self.optimisers[t]

        def step(x: Tensor, y: Tensor, mask: Tensor | None) -> None:
            self.optimiser.zero_grad()
            self.loss(x, t, y, mask).backward()
            self.optimiser.step()

        self.take(t, step, x, y, self.mask(t))

    def module(self, t: Hashable | None) -> nn.Module:
        return self.networks.get(t, self.pattern)

    def _add(self, t: Hashable) -> None:
        """A network for a new task."""
        network = copy.deepcopy(self.network if self.networks else self.pattern)
        if self.start == "random":
            reset_parameters(network)
        self.networks = self.networks | {t: network}
        self.optimisers = self.optimisers | {t: self.new_optimiser(network)}

    def get_state(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "pattern": self.pattern.state_dict(),
            "networks": {t: network.state_dict() for t, network in self.networks.items()},
            "optimisers": {t: optimiser.state_dict() for t, optimiser in self.optimisers.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.pattern.load_state_dict(state["pattern"])
        self.networks, self.optimisers = {}, {}
        for t, weights in state["networks"].items():
            self.networks[t] = copy.deepcopy(self.pattern)
            self.networks[t].load_state_dict(weights)
            self.optimisers[t] = self.new_optimiser(self.networks[t])
            self.optimisers[t].load_state_dict(state["optimisers"][t])
        self.task = state["task"]
        self.network = self.module(self.task)
        self.graphed.forget()  # the networks are others now
