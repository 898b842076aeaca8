"""Meta-experience replay: steps on single examples, and only a part of the way that they lead."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

import torch
from torch import Tensor, nn

from gradmem.gradients import parameters
from gradmem.learners.one_by_one import (
    chain_steps,
    move,
    running_statistics_for_one,
    takes_chain_steps,
)
from gradmem.learners.replay import Remembering, Replay
from gradmem.trees import Tree, kind, leaves, size, take, tree_map
from gradmem.validation import positive, positive_int

__all__ = ["MER"]


class MER(Replay):
    """A single predictor whose steps on old and new examples are to point the same way.

    Algorithm 1 of the paper, for each example of a mini-batch in turn: s batches of the example
    itself and k − 1 remembered ones are drawn, and each is gone through with one step of plain SGD
    per example. After each batch the weights are put back to all but the share β of the way that
    it led (the within-batch Reptile update), after all s batches to all but the share γ of the way
    that these made (the across-batch update). Then the example may enter the memory.

    The examples of a mini-batch enter the memory after all of them were learned: with mini-batches
    of one, this is Algorithm 1 to the letter. Batch norm uses its running statistics in the steps
    on single examples, and moves them by each mini-batch.

    On an MLP with cross-entropy and without `clip` the steps are written out, without autograd.
    With Numba installed (`pip install "gradmem[numba]"`) they are compiled on a CPU: with the
    paper's MLP, `sample=100` and `batches=10`, an example takes 14 ms instead of 41 on one core.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`. `lr` is α, the rate of the steps on single examples. The across-batch update
        is a step of the optimizer along γ (θ₀ − θₛ) / α: with plain SGD it is the paper's. With
        another optimizer, α is its rate. `clip` bounds the gradients of all steps, those on single
        examples, too. All inputs have one shape.
    memory, memories, budget, keep, groups
        What is remembered (see `Replay`). The paper's is one reservoir: `budget=5120, groups=1`.
    sample
        k − 1, the remembered examples in a batch, drawn with replacement; fewer while there are
        not so many.
    batches
        s, the batches that are drawn for each example.
    beta
        β > 0.
    gamma
        γ > 0.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.MER(gm.mlp([2, 8, 2]), lr=0.03, budget=50, groups=1, sample=4, batches=2)
    >>> for t in ("first", "second"):
    ...     loss = learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> learner.memory.count("first")
    20

    References
    ----------
    Riemer et al., Learning to Learn without Forgetting by Maximizing Transfer and Minimizing
    Interference, ICLR 2019.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        sample: int = 5,
        batches: int = 3,
        beta: float = 0.1,
        gamma: float = 1.0,
        **common: Unpack[Remembering],
    ) -> None:
        super().__init__(network, **common)
        self.sample = positive_int("sample", sample)
        self.batches = positive_int("batches", batches)
        self.beta, self.gamma = positive("beta", beta), positive("gamma", gamma)

    def check(self, x: Tree, t: Hashable, y: Tree) -> None:
        super().check(x, t, y)
        for known, _ in self.memory.kinds:
            if known != kind(self.described(x, t)):
                raise ValueError(f"x must be like what was observed before, {known}")

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        self.memory.check(x, t, y)
        mask = self.mask(t)

        def look(x: Tree, y: Tree, mask: Tensor | None) -> tuple[Tensor]:
            with torch.no_grad():
                loss = self.loss(x, t, y, mask)
            self.look(loss)
            return (loss,)

        def step(x: Tree, y: Tree, masks: Tensor | None, loss: Tensor) -> tuple[Tensor]:
            weights, rate = parameters(self.network), self.rate
            live = [w.detach() for w in weights]
            start = [w.clone() for w in live]
            for i in range(self.batches):
                before = [w.clone() for w in live]
                own = None if masks is None else masks[i]
                self._step_by_step(t, take(x, i), take(y, i), own, rate)
                # the within-batch update, θ ← θᵢ₀ + β (θᵢₖ − θᵢ₀)
                torch._foreach_copy_(live, torch._foreach_lerp(before, live, self.beta))
            # the across-batch update, θ ← θ₀ + γ (θₛ − θ₀), by the optimizer
            way = torch._foreach_sub(start, live)
            torch._foreach_copy_(live, start)
            for w, part in zip(weights, way, strict=True):
                w.grad = part.mul_(self.gamma).div_(rate)
            self.descend(loss, self.optimizer)
            return (loss,)

        self.note_steps(t, leaves(x)[0].device)
        loss = self.take_once("loss", t, look, x, y, mask, moves=False)
        assert loss is not None
        for glance in range(self.glances):
            self.steps += glance > 0
            for i in range(size(x)):
                one, last = slice(i, i + 1), i == size(x) - 1
                batches = self._drawn(take(x, one), take(y, one), mask)
                drawn = self.batches * leaves(batches[0])[0].shape[1]
                self.count(drawn, drawn)
                # averages of the weights follow once for the mini-batch
                self.take_once(("step", last), t, step, *batches, loss, moves=last)
        self.memory.put(x, t, y, mask)
        return loss

    def _drawn(self, x: Tree, y: Tree, mask: Tensor | None) -> list[Tree | None]:
        """An example in front of remembered ones, `batches` times: x, y and masks: (s, k, …)."""
        tasks, s = list(self.memory), self.batches
        k = min(self.sample, sum(self.memory.count(row[0]) for row in self.memory.groups))
        found = self.memory.sample(tasks, s * k, self.masks, replace=True)
        none = (take(x, slice(0)), take(y, slice(0)))
        x_m, y_m, masks = (*(found[0] if found else none), None)[:3]
        if mask is None and masks is not None:
            mask = masks.new_ones(masks.shape[1])
        if masks is None and mask is not None:
            masks = mask.new_ones((s * k, len(mask)))

        def joined(one: Tensor, many: Tensor) -> Tensor:
            rest = many.reshape(s, k, *many.shape[1:])
            return torch.cat([one.expand(s, *one.shape), rest], 1)

        own = None if mask is None else joined(mask[None], masks)
        return [tree_map(joined, x, x_m), tree_map(joined, y, y_m), own]

    def _step_by_step(
        self, t: Hashable, x: Tree, y: Tree, masks: Tensor | None, rate: float | Tensor
    ) -> None:
        """θ ← θ − α ∇ℓ for each of the examples x: (k, …), y: (k, …)."""
        network = self.module(t)
        if self.criterion.is_plain and self.clip is None and not self.has_own_loss:
            given = self.passes.prepared(network, self.passes.safe(network, x))
            if takes_chain_steps(network, given, y):
                return chain_steps(network, given, y, masks, rate)
        weights = parameters(network)
        with running_statistics_for_one(network):
            for j in range(size(y)):
                one = slice(j, j + 1)
                mask = None if masks is None else masks[one]
                loss = self.loss(take(x, one), t, take(y, one), mask)
                move(weights, loss, rate, self.clip)
        return None
