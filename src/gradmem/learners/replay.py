"""What learners that replay share: an episodic memory, and samples of it beside the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gradmem.gradients import attach
from gradmem.learners.learner import Learner
from gradmem.learners.objectives import objective_of
from gradmem.learners.settings import Common
from gradmem.memory import EpisodicMemory, Masks, Policy, memory_of
from gradmem.trees import Tree, concatenate, kind, size

__all__ = ["Remembering", "Replay", "drawn", "examples_in", "in_batches", "mean_of"]

#: x, y, and which outputs count for each example, if not all do.
Batch = tuple[Tree, Tree, Tensor | None]


class Remembering(Common, total=False):
    """What every learner that replays can be given by keyword (see `Replay`)."""

    memory: EpisodicMemory | None
    memories: int
    budget: int | None
    keep: str | Policy
    groups: int | None


class Replay(Learner):
    """A learner that learns from remembered examples again.

    Parameters
    ----------
    network, lr, optimizer, loss, schedule, clip, transform, decide, grow, boundaries, average,
    glances, input_dropout, augment, not_finite, seed, graphs
        See `Learner`.
    memory
        An `EpisodicMemory`, in place of `memories`, `budget`, `keep` and `groups`.
    memories
        Examples remembered per task.
    budget
        Examples remembered in all, shared equally by the tasks seen so far; replaces `memories`.
    keep
        Which examples are remembered: a uniform sample of each task's, "reservoir", or another
        policy of `EpisodicMemory`.
    groups
        Most rows of memories. With 1 there is one row for the whole stream, as in the papers on
        replay: `budget=200, groups=1` keeps 200 examples of all that was seen, of whichever task.
        That is for tasks that share their outputs.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        memory: EpisodicMemory | None = None,
        memories: int = 256,
        budget: int | None = None,
        keep: str | Policy = "reservoir",
        groups: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(network, **common)
        seed = common.get("seed", 0)
        self.memory = memory_of(
            memory, memories, budget, keep, default="reservoir", seed=seed, groups=groups
        )
        attach(self.memory, objective_of(self))

    def outputs_of(self, t: Hashable, parts: Sequence[Tree]) -> list[Any]:
        """The network's outputs for several batches; those of one kind go through it together."""
        found: dict[int, Any] = {}
        kinds: dict[Any, list[int]] = {}
        for i, x in enumerate(parts):
            kinds.setdefault(kind(x), []).append(i)
        for places in kinds.values():
            some = [parts[i] for i in places]
            outputs = self.passes(self.module(t), concatenate(some))
            split = [outputs] if len(some) == 1 else outputs.split([size(x) for x in some])
            found.update(zip(places, split, strict=True))
        return [found[i] for i in range(len(parts))]

    def losses_of(self, t: Hashable, batches: Sequence[Batch]) -> list[Tensor]:
        """The mean loss of each of several batches."""
        if self.has_own_loss:
            return [self.loss(x, t, y, mask) for x, y, mask in batches]
        outputs = self.outputs_of(t, [x for x, _, _ in batches])
        return [
            self.criterion.mean(found, y, mask)
            for found, (_, y, mask) in zip(outputs, batches, strict=True)
        ]

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"memory": self.memory.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.memory.load_state_dict(state["memory"], self.device)


def drawn(
    memory: EpisodicMemory, tasks: Sequence[Hashable], n: int | None, masks: Masks
) -> list[Tree | None]:
    """A sample of the tasks' memories as inputs of a step: x, y, mask for each kind of examples."""
    return [part for batch in memory.sample(tasks, n, masks) for part in (*batch, None)[:3]]


def in_batches(parts: Sequence[Any]) -> list[Batch]:
    """What `drawn` gave, as batches."""
    batches = [(parts[i], parts[i + 1], parts[i + 2]) for i in range(0, len(parts), 3)]
    return [batch for batch in batches if batch[0] is not None]


def examples_in(parts: Sequence[Any]) -> int:
    """How many examples `drawn` gave."""
    return sum(size(x) for x, _, _ in in_batches(parts))


def mean_of(values: list[Tensor], shares: list[int]) -> Tensor:
    """The mean of some batches' means over all their examples; 0 if there are none."""
    parts = [value * (n / sum(shares)) for value, n in zip(values, shares, strict=True)]
    return torch.stack(parts).sum() if parts else torch.zeros(())
