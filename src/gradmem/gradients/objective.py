"""What is differentiated: a network's loss at examples, which stay as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradmem.gradients.loss import Criterion
from gradmem.trees import Tree, concatenate, leaves, size, take, tree_map

__all__ = ["Forward", "Objective", "TaskLoss", "Transform"]

#: Raw examples (n, …) → what the network takes.
Transform = Callable[[Any], Any]
#: x, t, y, mask → the mean loss of a batch.
TaskLoss = Callable[[Any, Hashable, Any, Tensor | None], Tensor]


class Forward:
    """Passes examples through networks, after a transform, and leaves the examples as they were.

    `noise`, if it is given, changes what the transform gave, in train mode only; the examples that
    are spared stay as they are.

    A network that changes its input in place is given a copy. Whether it does is found out in its
    first pass in each mode (train or eval), which is on a copy in any case.
    """

    def __init__(self, transform: Transform | None = None, noise: Transform | None = None) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a callable of x, got {transform!r}")
        self.transform, self.noise = transform, noise
        self._changes: dict[bool, bool] = {}  # training → whether inputs are changed

    def __call__(self, network: nn.Module, x: Tree, spared: int = 0) -> Any:
        """The network's outputs for x, of which the first so many examples are spared the noise."""
        changes = self._changes.get(network.training)
        given = self.safe(network, x)
        before = _versions(given)
        outputs = network(self.prepared(network, given, spared))
        changed = _versions(given) != before
        if changed and changes is False:
            raise RuntimeError(
                "the network changed its input in place, which it did not do before: copy the "
                "input in its forward()"
            )
        self._changes[network.training] = changed
        return outputs

    def prepared(self, network: nn.Module, given: Tree, spared: int = 0) -> Any:
        """What the network takes: the examples after the transform and, in train mode, noise."""
        x = given if self.transform is None else self.transform(given)
        if self.noise is None or not network.training or spared >= size(given):
            return x
        if not spared:
            return self.noise(x)
        return concatenate([take(x, slice(spared)), self.noise(take(x, slice(spared, None)))])

    def safe(self, network: nn.Module, x: Tree) -> Tree:
        """What a pass may be given: x, or a copy unless the network is known to leave x alone."""
        return x if self._changes.get(network.training) is False else tree_map(Tensor.clone, x)


@dataclass(frozen=True)
class Objective:
    """The loss of a network's outputs at examples of any task.

    `own_loss`, if there is one, gives the loss of a batch in place of network and criterion.
    `moves_statistics` says whether a pass over memories moves the running statistics of batch norm,
    and `changes_batches` whether noise is for mini-batches, too; both hold for `MemoryGradients`.
    """

    network: nn.Module
    criterion: Criterion = field(default_factory=Criterion)
    forward: Forward = field(default_factory=Forward)
    own_loss: TaskLoss | None = None
    moves_statistics: bool = True
    changes_batches: bool = True

    def outputs(self, x: Tree, spared: int = 0) -> Any:
        """The network's outputs for x: (n, …), of which the first so many are spared the noise."""
        if self.moves_statistics:
            return self.forward(self.network, x, spared)
        with _statistics_held(self.network):
            return self.forward(self.network, x, spared)

    def loss(
        self, x: Tree, t: Hashable, y: Tree, mask: Tensor | None = None, *, spared: int = 0
    ) -> Tensor:
        """The mean loss of a batch of task t: ()."""
        if self.own_loss is not None:
            return self.own_loss(x, t, y, mask)
        return self.criterion.mean(self.outputs(x, spared), y, mask)

    def copied(self) -> Objective:
        """The same with a copy of the network and without noise, to try something on."""
        network = copy.deepcopy(self.network)
        return replace(self, network=network, forward=Forward(self.forward.transform))


@contextmanager
def _statistics_held(network: nn.Module) -> Iterator[None]:
    """A block in which batch norm computes what it does, and its running statistics stay."""
    norms = [
        part
        for part in network.modules()
        if isinstance(part, _NormBase) and part.training and part.track_running_stats
    ]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def _versions(tree: Tree) -> list[int]:
    """Counts that torch raises when a tensor is changed in place."""
    return [0 if leaf.is_inference() else leaf._version for leaf in leaves(tree)]
