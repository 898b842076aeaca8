"""What is differentiated: a network's loss at examples, which stay as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from gradmem.gradients.loss import Criterion
from gradmem.trees import Tree, leaves, tree_map

__all__ = ["Forward", "Objective", "TaskLoss", "Transform"]

#: Raw examples (n, …) → what the network takes.
Transform = Callable[[Any], Any]
#: x, t, y, mask → the mean loss of a batch.
TaskLoss = Callable[[Any, Hashable, Any, Tensor | None], Tensor]


class Forward:
    """Passes examples through networks, after a transform, and leaves the examples as they were.

    `noise`, if it is given, changes what the transform gave, in train mode only.

    A network that changes its input in place is given a copy. Whether it does is found out in its
    first pass in each mode (train or eval), which is on a copy in any case.
    """

    def __init__(self, transform: Transform | None = None, noise: Transform | None = None) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a callable of x, got {transform!r}")
        self.transform, self.noise = transform, noise
        self._changes: dict[bool, bool] = {}  # training → whether inputs are changed

    def __call__(self, network: nn.Module, x: Tree) -> Any:
        """The network's outputs for x."""
        changes = self._changes.get(network.training)
        given = self.safe(network, x)
        before = _versions(given)
        outputs = network(self.prepared(network, given))
        changed = _versions(given) != before
        if changed and changes is False:
            raise RuntimeError(
                "the network changed its input in place, which it did not do before: copy the "
                "input in its forward()"
            )
        self._changes[network.training] = changed
        return outputs

    def prepared(self, network: nn.Module, given: Tree) -> Any:
        """What the network takes: the examples after the transform and, in train mode, noise."""
        x = given if self.transform is None else self.transform(given)
        return self.noise(x) if self.noise is not None and network.training else x

    def safe(self, network: nn.Module, x: Tree) -> Tree:
        """What a pass may be given: x, or a copy unless the network is known to leave x alone."""
        return x if self._changes.get(network.training) is False else tree_map(Tensor.clone, x)


@dataclass(frozen=True)
class Objective:
    """The loss of a network's outputs at examples of any task.

    `own_loss`, if there is one, gives the loss of a batch in place of network and criterion.
    """

    network: nn.Module
    criterion: Criterion = field(default_factory=Criterion)
    forward: Forward = field(default_factory=Forward)
    own_loss: TaskLoss | None = None

    def outputs(self, x: Tree) -> Any:
        """The network's outputs for x: (n, …)."""
        return self.forward(self.network, x)

    def loss(self, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None) -> Tensor:
        """The mean loss of a batch of task t: ()."""
        if self.own_loss is not None:
            return self.own_loss(x, t, y, mask)
        return self.criterion.mean(self.outputs(x), y, mask)

    def copied(self) -> Objective:
        """The same with a copy of the network and without noise, to try something on."""
        network = copy.deepcopy(self.network)
        return replace(self, network=network, forward=Forward(self.forward.transform))


def _versions(tree: Tree) -> list[int]:
    """Counts that torch raises when a tensor is changed in place."""
    return [0 if leaf.is_inference() else leaf._version for leaf in leaves(tree)]
