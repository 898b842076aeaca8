"""Which tasks are the constraints of a step: the same in all processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gradmem.distributed.collectives import Collectives
from gradmem.memory import EpisodicMemory, Masks, Stack
from gradmem.trees import Tree
from gradmem.validation import descriptor

__all__ = ["Agreement", "Past"]


@dataclass(frozen=True)
class Past:
    """The constraints of a step of several processes.

    Attributes
    ----------
    tasks
        The past tasks, in an order that all processes agree on.
    numbers, known
        The tasks' numbers among all tasks that are known, and how many these are.
    counts, seen
        How many examples of each task each process remembers, and was offered so far: (W, k).
    batch
        How many examples each process learns from in this step: (W,); None if it was not said.
    own
        All tasks of which this process remembers examples, constraints or not.
    some_empty
        Whether there is a process that remembers nothing at all.
    stacks, examples
        Tasks → what this process remembers of them, and task → (x, y), its examples.
    masks
        Tasks → which outputs are theirs.
    """

    tasks: tuple[Hashable, ...]
    numbers: tuple[int, ...]
    known: int
    counts: torch.Tensor
    seen: torch.Tensor
    batch: torch.Tensor | None
    own: tuple[Hashable, ...]
    some_empty: bool
    stacks: Callable[[Sequence[Hashable]], list[Stack]]
    examples: Callable[[Hashable], tuple[Tree, Tree]]
    masks: Masks | None

    def __len__(self) -> int:
        return len(self.tasks)

    def spare(self) -> Stack:
        """The first task that this process remembers, for passes in which it has no example.

        If there is a process that remembers nothing, all processes raise ValueError.
        """
        if self.some_empty:
            raise ValueError(
                "a process remembers nothing, and the processes go through the model together: "
                "let every process add its part of each batch"
            )
        return self.stacks(self.own[:1])[0]

    @property
    def marks(self) -> list[tuple[int, int]]:
        """Equal in two steps for a task of which no process has come to remember anything else.

        Examples are remembered in place of others when more are seen; fewer, when a budget shrinks.
        """
        counts, seen = self.counts.sum(0).tolist(), self.seen.sum(0).tolist()
        return list(zip(counts, seen, strict=True))

    @property
    def shares(self) -> torch.Tensor:
        """What each process's mean counts in a task's mean, in double precision: (W, k)."""
        return self.counts.double() / self.counts.sum(0)


class Agreement:
    """Agrees on tasks and numbers of examples, by one small collective in a step.

    A task that a process meets for the first time is made known to all: descriptors are sent then,
    and never again. Elsewhere tasks are numbers.

    Attributes
    ----------
    order
        All tasks that any process has observed, in the order in which they became known.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.order: tuple[Hashable, ...] = ()

    def past(
        self,
        t: Hashable | None,
        memory: EpisodicMemory,
        masks: Masks | None = None,
        batch: int = 0,
    ) -> Past:
        """The constraints of a step in which this process learns task t; all tasks for None.

        All remembered tasks but t, if all processes learn t. If they learn different tasks, each
        is a past task to the others: all remembered tasks are constraints then.
        """
        known = {one: i for i, one in enumerate(self.order)}
        own = [*memory] if t is None else [*memory, descriptor(t)]
        unknown = [one for one in dict.fromkeys(own) if one not in known]
        numbers = [len(unknown), batch, -1 if t is None else known.get(t, -1)]
        numbers += [memory.count(one) if one in memory else 0 for one in self.order]
        numbers += [memory.seen(one) if one in memory else 0 for one in self.order]
        mine = torch.tensor(numbers, device=self.collectives.device)
        every = self.collectives.gather(mine, "counts").view(self.collectives.size, -1).cpu()
        if int(every[:, 0].sum()):
            self.meet(unknown)
            return self.past(t, memory, masks, batch)
        counts, seen = every[:, 3:].chunk(2, 1)
        current = set(every[:, 2].tolist())
        left_out = current if len(current) == 1 else ()
        chosen = [i for i, n in enumerate(counts.sum(0).tolist()) if n and i not in left_out]
        return Past(
            tuple(self.order[i] for i in chosen),
            tuple(chosen),
            len(self.order),
            counts[:, chosen],
            seen[:, chosen],
            every[:, 1] if int(every[:, 1].sum()) else None,
            tuple(memory),
            bool((counts.sum(1) == 0).any()),
            memory.stacks if masks is None else partial(memory.stacks, masks=masks),
            memory.__getitem__,
            masks,
        )

    def meet(self, tasks: Sequence[Hashable]) -> None:
        """Make tasks known to all processes; called by all of them."""
        found = self.collectives.gather_objects(list(tasks))
        self.order = tuple(dict.fromkeys([*self.order, *(t for one in found for t in one)]))
