"""The episodic memory: the last examples of every task observed so far (Section 3)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmem.memory.stack import Stack, exact
from gradmem.validation import positive_int

__all__ = ["EpisodicMemory", "FirstExamples"]

#: Which outputs are some tasks': (k, classes), or None if all are; a learner's `masks`.
Masks = Callable[[Sequence[Hashable]], Tensor | None]


def _all_outputs(tasks: Sequence[Hashable]) -> None:
    """Tasks that share their outputs."""


class EpisodicMemory:
    """For each task, the last examples observed, oldest first.

    Parameters
    ----------
    memories
        Examples kept per task.
    budget
        If given, examples kept in all instead: shared equally among the tasks seen so far, so that
        each task's share shrinks as new tasks arrive (the number of tasks need not be known).

    Examples
    --------
    >>> memory = EpisodicMemory(memories=3)
    >>> for i in range(5):
    ...     memory.add(torch.tensor([[float(i)]]), "a", torch.tensor([i]))
    >>> x, y = memory["a"]
    >>> y
    tensor([2, 3, 4])
    >>> list(memory), len(memory)
    (['a'], 1)
    """

    def __init__(self, memories: int = 256, budget: int | None = None) -> None:
        self.memories = positive_int("memories", memories)
        self.budget = None if budget is None else positive_int("budget", budget)
        self._shelves: dict[_Kind, _Shelf] = {}
        self._places: dict[Hashable, tuple[_Shelf, int]] = {}
        self.version = 0
        """Changes whenever a task arrives, and with it where things lie."""
        self._others: tuple[Hashable, list[Stack]] | None = None

    def share(self, n_tasks: int) -> int:
        """Examples that each of `n_tasks` tasks may keep."""
        if self.budget is None:
            return self.memories
        share = self.budget // max(1, n_tasks)
        if share < 1:
            raise ValueError(
                f"budget must allow one example for each of {n_tasks} tasks, got {self.budget}"
            )
        return share

    def check(self, x: Tensor, t: Hashable) -> None:
        """Raise what `add` would raise, and change nothing."""
        if t not in self._places:
            self.share(len(self) + 1)
            return
        shelf, _ = self._places[t]
        if _kind(x) != shelf.kind:
            raise ValueError(
                f"x must be like task {t!r}'s other examples, {shelf.kind}, got {_kind(x)}"
            )

    def add(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        """Remember x: (n, …) and y: (n,) as task t's newest examples."""
        self.check(x, t)
        if t not in self._places:
            share = self.share(len(self) + 1)
            for shelf in self._shelves.values():
                shelf.resize(share)
            shelf = self._shelves.setdefault(_kind(x), _Shelf(x, y, share))
            self._places[t] = shelf, shelf.new_row(x, y)
            self.version += 1
        shelf, row = self._places[t]
        shelf.add(row, x, y)

    def __getitem__(self, t: Hashable) -> tuple[Tensor, Tensor]:
        """(x, y) kept for task t, oldest first."""
        shelf, row = self._places[t]
        return shelf.in_order(row)

    def count(self, t: Hashable) -> int:
        """How many examples are kept for task t."""
        shelf, row = self._places[t]
        return shelf.counts[row]

    def stacks(self, tasks: Sequence[Hashable], masks: Masks = _all_outputs) -> list[Stack]:
        """What is kept for `tasks`, in their order, without a copy.

        Tasks whose examples lie next to each other come in one `Stack`; one stack is all there is
        while inputs are of one kind and the tasks follow the order in which they were met.
        """
        runs: list[tuple[_Shelf, int, list[Hashable]]] = []
        for t in tasks:
            shelf, row = self._places[t]
            if runs and runs[-1][0] is shelf and runs[-1][1] + len(runs[-1][2]) == row:
                runs[-1][2].append(t)
            else:
                runs.append((shelf, row, [t]))
        return [
            shelf.stack(start, start + len(those), masks(those)) for shelf, start, those in runs
        ]

    def others(self, t: Hashable, masks: Masks = _all_outputs) -> list[Stack]:
        """What is kept for all tasks but t; the same stacks as long as only t is observed."""
        key = (t, self.version, masks is _all_outputs)
        if self._others is None or self._others[0] != key:
            self._others = key, self.stacks([k for k in self if k != t], masks)
        return self._others[1]

    def sample(
        self, tasks: Sequence[Hashable], n: int | None, masks: Masks = _all_outputs
    ) -> list[tuple[Tensor, ...]]:
        """N examples of the tasks, drawn without replacement (all of them if None or too few).

        As batches (x, y), or (x, y, mask) where tasks have outputs of their own: one, or none if
        there is nothing, as long as inputs are of one kind.
        """
        stacks = self.stacks(tasks, masks)
        some = next((stack.masks for stack in stacks if stack.masks is not None), None)
        sizes = [count for stack in stacks for count in stack.counts]
        total = sum(sizes)
        chosen = None if n is None or n >= total else torch.randperm(total)[:n]
        batches: dict[_Kind, list[tuple[Tensor, ...]]] = {}
        start = 0
        for stack in stacks:
            m = stack.y.shape[1]
            # positions of the filled slots in the stack, all tasks in one row
            slots = torch.cat([i * m + torch.arange(c) for i, c in enumerate(stack.counts)])
            if chosen is not None:
                inside = (chosen >= start) & (chosen < start + len(slots))
                start += len(slots)
                slots = slots[chosen[inside] - (start - len(slots))]
            batch = [stack.x.flatten(0, 1), stack.y.flatten()]
            if some is not None:  # then all batches have them
                all_outputs = some.new_ones((len(stack), some.shape[1]))
                own = all_outputs if stack.masks is None else stack.masks
                batch.append(own.repeat_interleave(m, 0))
            if len(slots) < len(batch[1]):
                slots = slots.to(batch[1].device)
                batch = [part[slots] for part in batch]
            if len(batch[1]):
                batches.setdefault(_kind(batch[0]), []).append(tuple(batch))
        return [
            tuple(torch.cat(part) for part in zip(*parts, strict=True))
            if len(parts) > 1
            else parts[0]
            for parts in batches.values()
        ]

    def __iter__(self) -> Iterator[Hashable]:
        """The tasks, in the order they were first observed."""
        return iter(self._places)

    def __contains__(self, t: Hashable) -> bool:
        return t in self._places

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._places)

    def __repr__(self) -> str:
        limit = f"memories={self.memories}" if self.budget is None else f"budget={self.budget}"
        return f"EpisodicMemory({limit}, {len(self)} tasks)"

    def state_dict(self) -> dict[str, Any]:
        """What is kept, slot by slot: sums over the memory come out the same to the last bit."""
        return {
            "limits": (self.memories, self.budget),
            "tasks": {t: shelf.get_row(row) for t, (shelf, row) in self._places.items()},
        }

    def load_state_dict(
        self, state: dict[str, Any], device: torch.device | str | None = None
    ) -> None:
        """Take over what `state_dict` gave; on a device, if one is named."""
        if tuple(state["limits"]) != (self.memories, self.budget):
            raise ValueError(
                f"memories and budget must be {tuple(state['limits'])} as when the state was "
                f"saved, got {(self.memories, self.budget)}"
            )
        self._places = {}
        self.version += 1
        share = self.share(len(state["tasks"]))
        self._shelves = {kind: s for kind, s in self._shelves.items() if s.size == share}
        for shelf in self._shelves.values():
            shelf.clear()
        for t, (x, y, oldest) in state["tasks"].items():
            x, y = x.to(device), y.to(device)
            shelf = self._shelves.setdefault(_kind(x), _Shelf(x, y, share))
            row = shelf.new_row(x, y)
            shelf.add(row, x, y)
            shelf.oldest[row] = oldest
            self._places[t] = shelf, row


class FirstExamples(EpisodicMemory):
    """For each task, the first examples observed instead of the last."""

    def add(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        room = self.memories - (self.count(t) if t in self else 0)
        self.check(x, t)
        if room > 0:
            super().add(x[:room], t, y[:room])


_Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


def _kind(x: Tensor) -> _Kind:
    return tuple(x.shape[1:]), x.dtype, x.device


class _Shelf:
    """Tasks with inputs of one kind, a row of `size` slots each, in one tensor.

    A row is a ring: once it is full, the newest example replaces the oldest. Its slots are filled
    with copies of the task's first example until they are used, so that all of them can be passed
    through a network; `counts` says how many count.
    """

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.kind = _kind(x)
        self.size = size
        self.x = x.new_empty((0, size, *x.shape[1:]))
        self.y = y.new_empty((0, size))
        self.shares = torch.empty((0, size), dtype=exact(x), device=x.device)  # see `Stack`
        self.counts: list[int] = []
        self.oldest: list[int] = []  # the slot that is overwritten next, once the row is full

    def new_row(self, x: Tensor, y: Tensor) -> int:
        row = len(self.counts)
        if row == len(self.x):
            self._grow(max(4, 2 * row))
        self.x[row] = x[0].detach()
        self.y[row] = y[0]
        self.shares[row] = 0
        self.counts.append(0)
        self.oldest.append(0)
        return row

    def add(self, row: int, x: Tensor, y: Tensor) -> None:
        if len(y) > self.size:
            x, y = x[-self.size :], y[-self.size :]
        while len(y):
            count = self.counts[row]
            slot = count if count < self.size else self.oldest[row]
            n = min(len(y), self.size - slot)
            self.x[row, slot : slot + n] = x[:n].detach()
            self.y[row, slot : slot + n] = y[:n]
            if count < self.size:
                self.counts[row] += n
                self.shares[row, : count + n] = 1 / (count + n)
            else:
                self.oldest[row] = (slot + n) % self.size
            if n == len(y):
                return
            x, y = x[n:], y[n:]

    def get_row(self, row: int) -> tuple[Tensor, Tensor, int]:
        n = self.counts[row]
        return self.x[row, :n].clone(), self.y[row, :n].clone(), self.oldest[row]

    def in_order(self, row: int) -> tuple[Tensor, Tensor]:
        x, y = self.x[row, : self.counts[row]], self.y[row, : self.counts[row]]
        return x.roll(-self.oldest[row], 0), y.roll(-self.oldest[row], 0)

    def stack(self, start: int, stop: int, masks: Tensor | None) -> Stack:
        which = slice(start, stop)
        counts = tuple(self.counts[which])
        return Stack(self.x[which], self.y[which], counts, masks, self.shares[which])

    def resize(self, size: int) -> None:
        """Give every row `size` slots, keeping its newest examples."""
        if size == self.size:
            return
        kept = [self.in_order(row) for row in range(len(self.counts))]
        self.size, self.counts, self.oldest = size, [], []
        self.x = self.x.new_empty((0, size, *self.x.shape[2:]))
        self.y, self.shares = self.y.new_empty((0, size)), self.shares.new_empty((0, size))
        for x, y in kept:
            self.add(self.new_row(x, y), x, y)

    def clear(self) -> None:
        """Forget all tasks, and keep the room: what refers to it, such as a graph, stays valid."""
        self.counts, self.oldest = [], []

    def _grow(self, rows: int) -> None:
        for name in ("x", "y", "shares"):
            old = getattr(self, name)
            new = old.new_empty((rows, *old.shape[1:]))
            new[: len(old)] = old
            setattr(self, name, new)
