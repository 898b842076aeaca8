"""Averaged GEM: one reference gradient for all that is remembered, instead of one per task."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gradmem.gradients import attach, loss_gradient, parameters, set_gradient
from gradmem.learners.learner import Learner
from gradmem.learners.objectives import objective_of
from gradmem.learners.replay import drawn, examples_in, in_batches
from gradmem.learners.settings import Common
from gradmem.memory import EpisodicMemory, Policy, memory_of
from gradmem.projection import Projection
from gradmem.trees import Tree, size
from gradmem.validation import positive_int

__all__ = ["AGEM", "Averaging"]


class Averaging(Common, total=False):
    """What A-GEM can be given by keyword."""

    memory: EpisodicMemory | None
    memories: int
    budget: int | None
    keep: str | Policy
    sample: int | None


class AGEM(Learner):
    """A single predictor whose steps may not raise the average loss at what is remembered.

    Cheaper than GEM, and weaker: one task's loss may rise if another's falls.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`.
    memory
        An `EpisodicMemory`, in place of `memories`, `budget` and `keep`.
    memories
        Examples remembered per task.
    budget
        Examples remembered in all, shared equally by the tasks seen so far; replaces `memories`.
    keep
        Which examples are remembered: a task's "last", or another policy of `EpisodicMemory`.
    sample
        How many of the other tasks' examples, drawn anew in each step, make the average; all of
        them if None.

    References
    ----------
    Chaudhry et al., Efficient Lifelong Learning with A-GEM, ICLR 2019.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        memory: EpisodicMemory | None = None,
        memories: int = 256,
        budget: int | None = None,
        keep: str | Policy = "last",
        sample: int | None = 256,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(network, **common)
        self.memory = memory_of(memory, memories, budget, keep, seed=common.get("seed", 0))
        attach(self.memory, objective_of(self))
        self.sample = None if sample is None else positive_int("sample", sample)
        self.project = Projection()

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        self.memory.check(x, t, y)
        others = [k for k in self.memory if k != t]

        def step(x: Tree, y: Tree, mask: Tensor | None, *past: Tree) -> tuple[Any, ...]:
            weights = parameters(self.network)
            batches = in_batches(past)  # one per kind of inputs
            n = sum(size(y_k) for _, y_k, _ in batches)
            past_losses = [
                self.loss(x_k, t, y_k, mask_k) * (size(y_k) / n) for x_k, y_k, mask_k in batches
            ]
            references = [loss_gradient(one, weights) for one in past_losses]
            loss = self.loss(x, t, y, mask)
            g = loss_gradient(loss, weights)
            self.require_finite(loss, g)
            if references:
                g_ref = torch.stack(references).sum(0)
                g = self.combined(g, loss.detach(), g_ref, torch.stack(past_losses).sum().detach())
            set_gradient(self.network, g)
            self.descend(loss, self.optimizer)
            return loss.detach(), g

        def sample() -> list[Tree | None]:
            past = drawn(self.memory, others, self.sample, self.masks)
            self.count(1, size(x) + examples_in(past))
            return past

        loss = self.take("any task", t, step, x, y, self.mask(t), draw=sample)
        self.memory.put(x, t, y, self.mask(t))
        return loss

    def combined(self, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
        """What is stepped along: g, without what goes against g_ref; `loss`, `loss_ref` at both."""
        return self.project(g, g_ref[None])

    def own_parts(self) -> Sequence[object]:
        return (self.project,)

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | self.project.counts()

    def get_state(self) -> dict[str, Any]:
        counts = self.project.counts()
        return super().get_state() | {"memory": self.memory.state_dict(), "counts": counts}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.memory.load_state_dict(state["memory"], self.device)
        self.project.set_counts(state["counts"])
