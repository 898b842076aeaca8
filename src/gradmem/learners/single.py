"""One network for all tasks, and nothing against forgetting."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from gradmem.learners.learner import Learner

__all__ = ["Single"]


class Single(Learner):
    """A single predictor trained across all tasks.

    Parameters
    ----------
    network, lr, seed, graphs
        See `Learner`.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.Single(gm.mlp([2, 8, 2]), lr=0.1)
    >>> learner.observe(torch.randn(10, 2), "any task", torch.randint(2, (10,)))
    >>> learner.predict(torch.randn(3, 2)).shape
    torch.Size([3])
    """

    def learn(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        def step(x: Tensor, y: Tensor, mask: Tensor | None) -> None:
            self.optimiser.zero_grad()
            self.loss(x, t, y, mask).backward()
            self.optimiser.step()

        self.take("any task", step, x, y, self.mask(t))
