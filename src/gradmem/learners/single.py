"""One network for all tasks, and nothing against forgetting."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from gradmem.learners.learner import Learner
from gradmem.trees import Tree, size

__all__ = ["Single"]


class Single(Learner):
    """A single predictor trained across all tasks.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.Single(gm.mlp([2, 8, 2]), lr=0.1)
    >>> loss = learner.observe(torch.randn(10, 2), "any task", torch.randint(2, (10,)))
    >>> learner.predict(torch.randn(3, 2)).shape
    torch.Size([3])
    """

    distributes = True

    def repeats(self, t: Hashable) -> bool:
        return type(self).learn is Single.learn

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        def step(x: Tree, y: Tree, mask: Tensor | None) -> tuple[Tensor]:
            self.optimizer.zero_grad()
            loss = self.loss(x, t, y, mask)
            loss = self.backward(loss, size(x))
            self.descend(loss, self.optimizer)
            return (loss.detach(),)

        return self.take("any task", t, step, x, y, self.mask(t))
