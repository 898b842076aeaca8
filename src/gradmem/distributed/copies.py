"""Which process computes a task's gradient: all of them together, or one that has a copy.

A gradient that every process computes a part of is sent by every process. One that a process has
computed alone is sent by that one: W times less in all. So the examples of a task that is no longer
observed are copied to one process, once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gradmem.distributed.agreement import Past
from gradmem.distributed.collectives import Collectives
from gradmem.memory import Stack
from gradmem.trees import Tree, concatenate, kind, leaves, size, take, to, tree_map

__all__ = ["Copies", "Work"]

#: Numbers that change whenever what is remembered of a task changes in some process.
Marks = tuple[int, int]


class Work:
    """What each process computes of each row of G.

    Attributes
    ----------
    shares
        (W, k), what a process's gradient counts in a row, in double precision; zero if it has none.
    copied
        The places of the tasks that this process computes alone, from its copies.
    """

    def __init__(self, shares: Tensor, copied: Sequence[int]) -> None:
        self.shares, self.copied = shares, frozenset(copied)

    def places(self, rank: int, start: int, stop: int) -> list[int]:
        """The rows between start and stop of which a process computes something."""
        found: list[int] = (start + self.shares[rank, start:stop].nonzero()[:, 0]).tolist()
        return found


class Copies:
    """This process's copies of all examples of some tasks.

    A task is copied when it was not added to since the last step. As many tasks as can be dealt out
    evenly are; the others, and those that are still observed, are computed by all processes. All
    processes decide alike, from the numbers that they have agreed on.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.marks: dict[Hashable, Marks] = {}
        self._owners: dict[Hashable, tuple[int, Marks]] = {}
        self._examples: dict[Hashable, tuple[Tree, Tree]] = {}

    def forget(self, marks: Mapping[Hashable, Sequence[int]] | None = None) -> None:
        """Begin again, after a state was loaded that has these marks."""
        self.marks = {} if marks is None else {t: (n, m) for t, (n, m) in marks.items()}
        self._owners, self._examples = {}, {}

    def work(self, past: Past) -> Work:
        """Who computes what in a step; called by all processes, which copy examples for it."""
        marks = dict(zip(past.tasks, past.marks, strict=True))
        remembering = (past.counts > 0).sum(0).tolist()
        dealt = past.known // self.collectives.size * self.collectives.size
        owners = [-1] * len(past)  # nobody's: all processes compute a part
        for i, t in enumerate(past.tasks):
            still = self.marks.get(t) == marks[t]
            if still and past.numbers[i] < dealt and remembering[i] > 1:
                owners[i] = past.numbers[i] % self.collectives.size
                if self._owners.get(t) != (owners[i], marks[t]):
                    self._copy(t, i, owners[i], past)
                    self._owners[t] = owners[i], marks[t]
            else:
                self._owners.pop(t, None)
                self._examples.pop(t, None)
        self.marks = {**self.marks, **marks}
        alone = torch.tensor(owners) == torch.arange(self.collectives.size)[:, None]
        shares = torch.where(alone.any(0), alone.double(), past.shares)
        return Work(shares, alone[self.collectives.rank].nonzero()[:, 0].tolist())

    def _copy(self, t: Hashable, i: int, owner: int, past: Past) -> None:
        """Send all examples of a task, the i-th of the past, to its owner."""
        own = past.examples(t) if past.counts[self.collectives.rank, i] else None
        if own is not None and owner != self.collectives.rank:
            sent = sum(leaf.nbytes for leaf in (*leaves(own[0]), *leaves(own[1])))
            self.collectives.traffic.add("copies of examples", sent)
        parts = self.collectives.collect(own, owner)
        if parts is not None:
            device = self.collectives.device if own is None else leaves(own[0])[0].device
            there = [part for part in parts if part is not None]
            x, y = (to(concatenate([part[j] for part in there]), device) for j in (0, 1))
            self._examples[t] = x, y

    def stacks(self, tasks: Sequence[Hashable], past: Past) -> list[Stack]:
        """The copies of some tasks, in their order; equally many examples in one stack."""
        found = []
        for _, same in groupby(tasks, key=lambda t: (kind(self._examples[t]), self._count(t))):
            some = list(same)
            x, y = (self._together(some, j) for j in (0, 1))
            masks = None if past.masks is None else past.masks(some)
            found.append(Stack(x, y, (self._count(some[0]),) * len(some), masks, tasks=tuple(some)))
        return found

    def _count(self, t: Hashable) -> int:
        return size(self._examples[t][1])

    def _together(self, tasks: Sequence[Hashable], j: int) -> Tree:
        """One tensor of several tasks' examples, (k, n, …), of which their copies become views."""
        parts = [self._examples[t][j] for t in tasks]
        whole = _joined(parts)
        if whole is None:
            whole = tree_map(lambda *some: torch.stack(some), *parts)
            for i, t in enumerate(tasks):
                pair: list[Any] = list(self._examples[t])
                pair[j] = take(whole, i)
                self._examples[t] = pair[0], pair[1]
        return whole


def _joined(parts: Sequence[Tree]) -> Tree | None:
    """Trees that lie one after the other in memory as one: (k, n, …); None if they do not."""
    columns = list(zip(*(leaves(part) for part in parts), strict=True))
    for some in columns:
        first = some[0]
        memory = first.untyped_storage().data_ptr()
        for i, one in enumerate(some):
            apart = one.untyped_storage().data_ptr() != memory
            if apart or one.data_ptr() != first.data_ptr() + i * first.nbytes:
                return None

    def spread(leaf: Tensor) -> Tensor:
        return leaf.as_strided((len(parts), *leaf.shape), (leaf.numel(), *leaf.stride()))

    return tree_map(spread, parts[0])
