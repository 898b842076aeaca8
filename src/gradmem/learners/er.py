"""Experience replay: every step is also one on a sample of what is remembered."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

from torch import Tensor, nn

from gradmem.learners.replay import Remembering, Replay, drawn, examples_in, in_batches, mean_of
from gradmem.trees import Tree, size
from gradmem.validation import positive_int

__all__ = ["ER"]


class ER(Replay):
    """A single predictor that learns from each mini-batch together with remembered examples.

    A step is along the gradient of the mean loss at Bₙ ∪ B_M, the mini-batch and a sample of the
    memory (Algorithm 1 of the paper).

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`.
    memory, memories, budget, keep, groups
        What is remembered (see `Replay`).
    sample
        Remembered examples in a step, of all tasks alike, drawn anew in each.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.ER(gm.mlp([2, 8, 2]), memories=5, sample=4)
    >>> for t in ("first", "second"):
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> learner.memory.count("first")
    5

    References
    ----------
    Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019.
    """

    def __init__(
        self, network: nn.Module, *, sample: int = 10, **common: Unpack[Remembering]
    ) -> None:
        super().__init__(network, **common)
        self.sample = positive_int("sample", sample)

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        self.memory.check(x, t, y)

        def step(x: Tree, y: Tree, mask: Tensor | None, *past: Tree) -> tuple[Tensor]:
            batches = [(x, y, mask), *in_batches(past)]
            losses = self.losses_of(t, batches)
            self.optimizer.zero_grad()
            mean_of(losses, [size(x_k) for x_k, _, _ in batches]).backward()
            self.descend(losses[0], self.optimizer)
            return (losses[0].detach(),)

        def sample() -> list[Tree | None]:
            past = drawn(self.memory, list(self.memory), self.sample, self.masks)
            self.count(1, size(x) + examples_in(past))
            return past

        loss = self.take("any task", t, step, x, y, self.mask(t), draw=sample)
        self.memory.put(x, t, y, self.mask(t))
        return loss
