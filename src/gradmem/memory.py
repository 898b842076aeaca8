"""The episodic memory: the last examples of every task observed so far (Section 3)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradmem.validation import positive_int

__all__ = ["EpisodicMemory", "FirstExamples"]


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
        self._rings: dict[Hashable, _Ring] = {}

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
        if t not in self._rings:
            self.share(len(self) + 1)
        elif self._rings[t].x.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"x must have the shape of task {t!r}'s other examples, "
                f"{tuple(self._rings[t].x.shape[1:])}, got {tuple(x.shape[1:])}"
            )

    def add(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        """Remember x: (n, …) and y: (n,) as task t's newest examples."""
        self.check(x, t)
        if t not in self._rings:
            share = self.share(len(self) + 1)
            self._rings = {k: ring.resized(share) for k, ring in self._rings.items()}
            self._rings[t] = _Ring.empty_like(x, y, share)
        self._rings[t].add(x, y)

    def __getitem__(self, t: Hashable) -> tuple[Tensor, Tensor]:
        """(x, y) kept for task t, oldest first."""
        return self._rings[t].in_order()

    def stored(self, t: Hashable) -> tuple[Tensor, Tensor]:
        """(x, y) kept for task t in no particular order, without a copy."""
        return self._rings[t].filled()

    def __iter__(self) -> Iterator[Hashable]:
        """The tasks, in the order they were first observed."""
        return iter(self._rings)

    def __contains__(self, t: Hashable) -> bool:
        return t in self._rings

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._rings)

    def __repr__(self) -> str:
        limit = f"memories={self.memories}" if self.budget is None else f"budget={self.budget}"
        return f"EpisodicMemory({limit}, {len(self)} tasks)"

    def state_dict(self) -> dict[str, Any]:
        return {
            "limits": (self.memories, self.budget),
            "tasks": {t: tuple(v.clone() for v in self[t]) for t in self},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if tuple(state["limits"]) != (self.memories, self.budget):
            raise ValueError(
                f"memories and budget must be {tuple(state['limits'])} as when the state was "
                f"saved, got {(self.memories, self.budget)}"
            )
        rings = {}
        for t, (x, y) in state["tasks"].items():
            rings[t] = _Ring.empty_like(x, y, self.share(len(state["tasks"])))
            rings[t].add(x, y)
        self._rings = rings


class FirstExamples(EpisodicMemory):
    """For each task, the first examples observed instead of the last."""

    def add(self, x: Tensor, t: Hashable, y: Tensor) -> None:
        kept = len(self.stored(t)[1]) if t in self else 0
        room = self.memories - kept
        self.check(x, t)
        if room > 0:
            super().add(x[:room], t, y[:room])


class _Ring:
    """The last `size` examples of one task; slot `start` holds the oldest once all are filled."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.start = self.count = 0

    @classmethod
    def empty_like(cls, x: Tensor, y: Tensor, size: int) -> _Ring:
        return cls(x.new_empty((size, *x.shape[1:])), y.new_empty((size,)))

    def add(self, x: Tensor, y: Tensor) -> None:
        size = len(self.y)
        x, y = x[-size:], y[-size:]
        slots = (self.start + self.count + torch.arange(len(y), device=self.y.device)) % size
        self.x[slots] = x.detach()
        self.y[slots] = y
        lost = max(0, self.count + len(y) - size)
        self.start = (self.start + lost) % size
        self.count += len(y) - lost

    def filled(self) -> tuple[Tensor, Tensor]:
        return self.x[: self.count], self.y[: self.count]

    def in_order(self) -> tuple[Tensor, Tensor]:
        x, y = self.filled()
        return x.roll(-self.start, 0), y.roll(-self.start, 0)

    def resized(self, size: int) -> _Ring:
        x, y = self.in_order()
        ring = _Ring.empty_like(x, y, size)
        ring.add(x, y)
        return ring
