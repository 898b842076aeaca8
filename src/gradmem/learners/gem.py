"""Gradient episodic memory: no step may raise the loss at what is remembered (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from torch import Tensor, nn

from gradmem.gradients import MemoryGradients, set_gradient
from gradmem.learners.learner import Learner
from gradmem.memory import EpisodicMemory
from gradmem.projection import Projection

__all__ = ["GEM"]


class GEM(Learner):
    """A single predictor whose gradient is projected so that no remembered task's loss rises.

    Every observed task but the current one is a constraint, also when the current one comes back.

    That holds to first order, and so for a small rate, with margin 0 or the rule "floor"; the rule
    "shift" adds γ to all of the dual's solution and can let a loss rise a little. With batch norm
    it is about the network as it learns, normalising each task's memories by themselves; the
    running statistics that predictions use move all the time. A task's inputs have one shape.

    Parameters
    ----------
    network, lr, seed
        See `Learner`.
    memories
        Examples remembered per task: its last ones.
    margin
        γ ≥ 0, the paper's memory strength (see `project`).
    budget
        Examples remembered in all, shared equally by the tasks seen so far; replaces `memories`.
    margin_rule
        "shift" or "floor" (see `project`).
    gradients, tasks_per_chunk, memory_limit, precision
        How the gradients at the memories are computed, bounds on the memory that takes, and their
        precision (see `MemoryGradients`). All ways are exact in "fp32"; `learner.gradients` says
        which is in use.
    graphs
        On a GPU, whether steps become CUDA graphs, one per number of past tasks.

    Examples
    --------
    >>> import torch, gradmem as gm
    >>> learner = gm.GEM(gm.mlp([2, 8, 2]), lr=0.1, memories=5)
    >>> for t in ("first", "second"):
    ...     learner.observe(torch.randn(10, 2), t, torch.randint(2, (10,)))
    >>> x, y = learner.memory["first"]
    >>> x.shape, y.shape
    (torch.Size([5, 2]), torch.Size([5]))

    References
    ----------
    Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, NIPS 2017.
    """

    def __init__(
        self,
        network: nn.Module,
        lr: float = 0.1,
        memories: int = 256,
        margin: float = 0.5,
        budget: int | None = None,
        margin_rule: str = "shift",
        gradients: str = "auto",
        tasks_per_chunk: int | None = None,
        memory_limit: int | None = None,
        precision: str = "fp32",
        graphs: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(network, lr, seed, graphs)
        self.project = Projection(margin, margin_rule)
        self.memory = EpisodicMemory(memories, budget)
        self.memory_gradients = MemoryGradients(
            network, gradients, tasks_per_chunk, memory_limit, precision
        )
        self.graphed.need_less = self.memory_gradients.need_less

    def check_all(self, tasks: Collection[Hashable], classes: Collection[int]) -> None:
        self.memory.share(len({*self.memory, *tasks}))

    def learn(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        self.memory.check(x, t)
        past = self.memory.others(t, self.masks)

        def step(x: Tensor, y: Tensor, mask: Tensor | None) -> Any:
            G, g = self.memory_gradients.with_batch(past, x, y, mask)
            self.require_finite(g.sum())
            g_tilde = self.project(g, G)  # equation 12
            set_gradient(self.network, g_tilde)
            self.optimiser.step()
            return past, G, g_tilde

        # On a GPU, a graph per place and number of memories; elsewhere, the step as it stands.
        self.take(tuple(stack.key for stack in past), step, x, y, self.mask(t))
        self.memory.add(x, t, y)  # at the end: what could not be learned is not remembered

    @property
    def gradients(self) -> str:
        """How the gradients at the memories are computed: chain, batched, func, loop."""
        return self.memory_gradients.method or "auto"

    def statistics(self) -> dict[str, Any]:
        computed = {"gradients": self.gradients, "precision": self.memory_gradients.precision}
        return super().statistics() | self.project.counts() | computed

    def get_state(self) -> dict[str, Any]:
        counts = self.project.counts()
        return super().get_state() | {"memory": self.memory.state_dict(), "counts": counts}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.memory.load_state_dict(state["memory"], self.device)
        self.project.set_counts(state["counts"])
