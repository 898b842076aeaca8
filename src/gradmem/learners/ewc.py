"""Elastic weight consolidation: weights that mattered to finished tasks are held in place."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gradmem.gradients import attach, parameters
from gradmem.learners.learner import Learner
from gradmem.learners.objectives import objective_of
from gradmem.learners.one_by_one import running_statistics_for_one
from gradmem.learners.optimizers import padded
from gradmem.learners.settings import Common
from gradmem.memory import EpisodicMemory, memory_of
from gradmem.trees import Tree, size, take
from gradmem.validation import non_negative, one_of

__all__ = ["EWC"]


class EWC(Learner):
    """A single predictor whose loss is regularised by one quadratic term per finished task.

    The penalty λ Σₖ Fₖ (θ − θₖ)² over the finished tasks k is one parabola per weight, kept as two
    sums, ΣFₖ and ΣFₖθₖ, so a step costs the same at any number of tasks. A task counts as finished
    when another one is observed; if it comes back, it is finished again.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`.
    regularization
        λ ≥ 0.
    memories
        How many of a task's examples its Fisher information F is estimated from: its first ones,
        since the gradient at what was learned last is small and says little (measured on MNIST
        permutations with 10 memories: ACC 0.60 with the first, 0.55 with the last).
    memory
        An `EpisodicMemory`, in place of `memories`, if other examples than the first are to serve.
        It holds the current task's examples only.
    fisher
        "batch": the square of their mean gradient, as behind the published numbers; "example": the
        mean of their squared gradients.

    References
    ----------
    Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks, PNAS 2017.
    """

    FISHERS = ("batch", "example")

    def __init__(
        self,
        network: nn.Module,
        *,
        regularization: float = 100.0,
        memory: EpisodicMemory | None = None,
        memories: int = 256,
        fisher: str = "batch",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(network, **common)
        self.regularization = non_negative("regularization", regularization)
        self.fisher = one_of("fisher", fisher, self.FISHERS)
        seed = common.get("seed", 0)
        self.memory = memory_of(memory, memories, keep="first", default="first", seed=seed)
        attach(self.memory, objective_of(self))
        self.task: Hashable | None = None
        self.weights: list[Tensor] = [*parameters(network)]
        self.curvature = [torch.zeros_like(w) for w in self.weights]  # Σ Fₖ
        self.weighted = [torch.zeros_like(w) for w in self.weights]  # Σ Fₖθₖ

    def learn(self, x: Tree, t: Hashable, y: Tree) -> Tensor | None:
        if self.task is not None and t != self.task:
            self.consolidate()
        self.memory.check(x, t, y)

        def step(x: Tree, y: Tree, mask: Tensor | None) -> tuple[Tensor]:
            self.optimizer.zero_grad()
            loss = self.loss(x, t, y, mask)
            loss.backward()
            self._add_penalty()
            self.descend(loss, self.optimizer)
            return (loss.detach(),)

        loss = self.take("any task", t, step, x, y, self.mask(t))
        self.memory.put(x, t, y, self.mask(t))
        self.task = t
        return loss

    @torch.no_grad()
    def _add_penalty(self) -> None:
        """Add the penalty's gradient, 2λ (ΣFₖ θ − ΣFₖθₖ), to the loss's."""
        for w in self.weights:
            if w.grad is None:
                w.grad = torch.zeros_like(w)
        grads = [w.grad for w in self.weights if w.grad is not None]
        factor = 2 * self.regularization
        torch._foreach_addcmul_(grads, self.curvature, self.weights, value=factor)
        torch._foreach_add_(grads, self.weighted, alpha=-factor)

    @torch.no_grad()
    def consolidate(self) -> None:
        """Add the finished task's term to the penalty, and forget its examples."""
        x, y = self.memory[self.task]
        information = self._information(x, y)
        self.count(0, size(y))
        self.note([*self.curvature, *self.weighted])
        for w, F, curvature, weighted in zip(
            self.weights, information, self.curvature, self.weighted, strict=True
        ):
            curvature += F
            weighted += F * w
        self.memory = self.memory.holding({})

    @torch.enable_grad()
    def _information(self, x: Tree, y: Tree) -> list[Tensor]:
        """The diagonal of the Fisher information at x, y, shaped as the parameters."""
        n = size(y)
        ones = [slice(i, i + 1) for i in range(n)]
        batches = [slice(n)] if self.fisher == "batch" else ones
        squares = [torch.zeros_like(w) for w in self.weights]
        for some in batches:
            with running_statistics_for_one(self.network, size(take(y, some))):
                x_i, y_i = take(x, some), take(y, some)
                loss = self.loss(x_i, self.task, y_i, self.mask(self.task))
            grads = torch.autograd.grad(loss, self.weights, allow_unused=True)
            for total, grad in zip(squares, grads, strict=True):
                if grad is not None:
                    total += grad.square()
        return squares if self.fisher == "batch" else [total / n for total in squares]

    def follow(self, weights: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Sums of widened parameters are padded with zeros; those of new ones begin at zero."""
        places = {id(w): i for i, w in enumerate(self.weights)}

        def moved(sums: list[Tensor]) -> list[Tensor]:
            found = [places.get(id(w), places.get(id(old))) for w, old in weights]
            return [
                torch.zeros_like(w) if i is None else padded(sums[i], w.shape)
                for (w, _), i in zip(weights, found, strict=True)
            ]

        self.curvature, self.weighted = moved(self.curvature), moved(self.weighted)
        self.weights = [w for w, _ in weights]

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {
            "memory": self.memory.state_dict(),
            "task": self.task,
            "curvature": self.curvature,
            "weighted": self.weighted,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.memory.load_state_dict(state["memory"], self.device)
        self.task = state["task"]
        if self.task is not None and self.task not in self.memory:
            raise ValueError(f"task must be one that is remembered, got {self.task!r}")
        with torch.no_grad():  # in place, where a graph finds them
            torch._foreach_copy_(self.curvature, state["curvature"])
            torch._foreach_copy_(self.weighted, state["weighted"])
