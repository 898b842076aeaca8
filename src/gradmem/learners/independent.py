"""One network per task."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from gradmem.learners.learner import Learner
from gradmem.learners.settings import Common
from gradmem.learners.states import load_weights
from gradmem.networks import reset_parameters
from gradmem.trees import Tree
from gradmem.validation import one_of

__all__ = ["Independent"]


class Independent(Learner):
    """One independent predictor per task.

    In the paper each has T times fewer hidden units than the other learners' network. A task that
    was never observed is predicted by the network as it was given, untrained.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, boundaries, average, glances,
    input_dropout, augment, not_finite, seed, graphs
        See `Learner`; `grow` is refused. The network is the pattern of all others and is not
        trained itself.
    start
        What a new task's network starts from: "copy" of the one trained last, or "random" weights.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.Independent(gm.mlp([2, 8, 2]), start="random")
    >>> for t in "ab":
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> list(learner.networks)
    ['a', 'b']
    """

    shares_outputs = False
    one_network = averages_by_task = False
    STARTS = ("copy", "random")

    def __init__(
        self,
        network: nn.Module,
        *,
        start: str = "copy",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(network, **common)
        self.start = one_of("start", start, self.STARTS)
        self.task: Hashable | None = None
        self.pattern = copy.deepcopy(network)
        self.networks: dict[Hashable, nn.Module] = {}
        self.optimizers: dict[Hashable, Optimizer] = {}

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        if t not in self.networks:
            self._add(t)
        self.task, self.network, self.optimizer = t, self.networks[t], self.optimizers[t]

        def step(x: Tree, y: Tree, mask: Tensor | None) -> tuple[Tensor]:
            self.optimizer.zero_grad()
            loss = self.loss(x, t, y, mask)
            loss.backward()
            self.descend(loss, self.optimizer)
            return (loss.detach(),)

        return self.take(t, t, step, x, y, self.mask(t))

    def module(self, t: Hashable | None) -> nn.Module:
        return self.networks.get(t, self.pattern)

    def modules_by_task(self) -> dict[Hashable, nn.Module]:
        return dict(self.networks)

    def _add(self, t: Hashable) -> None:
        """A network for a new task."""
        network = copy.deepcopy(self.network if self.networks else self.pattern)
        if self.start == "random":
            reset_parameters(network)
        self.networks = self.networks | {t: network}
        self.optimizers = self.optimizers | {t: self.new_optimizer(network)}

    def get_state(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "pattern": self.pattern.state_dict(),
            "networks": {t: network.state_dict() for t, network in self.networks.items()},
            "optimizers": {t: self.state_of(one) for t, one in self.optimizers.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        load_weights(self.pattern, state["pattern"])
        self.let_go(self.optimizers.values())
        self.networks, self.optimizers = {}, {}
        for t, weights in state["networks"].items():
            self.networks[t] = copy.deepcopy(self.pattern)
            self.networks[t].load_state_dict(weights)
            self.optimizers[t] = self.new_optimizer(self.networks[t])
            self.load_state_of(self.optimizers[t], state["optimizers"][t])
        self.task = state["task"]
        self.network = self.module(self.task)
        self.graphed.forget()  # the networks are others now
