"""The memories of several tasks as one problem: x (k, m, …), y (k, m, …). Data only."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from gradmem.cuda.copies import copy_to
from gradmem.trees import Tree, leaves, take, tree_map

__all__ = ["Stack", "share_dtype"]


def share_dtype(x: Tree) -> torch.dtype:
    """The dtype of an example's share in its task's mean: no coarser than the network's may be."""
    types = [leaf.dtype for leaf in leaves(x) if leaf.is_floating_point()]
    return torch.float32 if types and torch.float64 not in types else torch.float64


@dataclass(frozen=True)
class Stack:
    """Memories of k tasks, each with room for m examples.

    Attributes
    ----------
    x, y
        Trees of tensors (k, m, …). Slots that are not filled yet repeat an observed example.
    counts
        How many slots of each task are filled; only these count.
    masks
        (k, classes): which outputs belong to the task; None if all do. Of a mini-batch with
        examples of several tasks, (1, m, classes).
    shares
        (k, m): what each example counts in its task's mean, 1/count or 0; made if left out. Of a
        mini-batch that others have joined, see `of_batch`.
    tasks
        The tasks' descriptors; of tasks that share their memories, the first one's.
    """

    x: Tree
    y: Tree
    counts: tuple[int, ...]
    masks: Tensor | None = None
    shares: Tensor = None  # type: ignore[assignment]
    tasks: tuple[Hashable, ...] = ()

    def __post_init__(self) -> None:
        if self.shares is None:
            first = leaves(self.y)[0]
            k, m = first.shape[:2]
            if self.counts == (m,) * k:
                shares = torch.full((k, m), 1 / m, dtype=share_dtype(self.x), device=first.device)
            else:
                counts = torch.tensor(self.counts)[:, None]
                filled = (torch.arange(m) < counts).to(share_dtype(self.x))
                parts = filled / counts.clamp(min=1)  # nothing may be kept of a task
                shares = copy_to(parts, first.device)
            object.__setattr__(self, "shares", shares)
        if not self.tasks:
            object.__setattr__(self, "tasks", (None,) * len(self.counts))

    @classmethod
    def of_batch(
        cls,
        x: Tree,
        y: Tree,
        mask: Tensor | None = None,
        t: Hashable = None,
        first: int | None = None,
    ) -> Stack:
        """A mini-batch as the memory of one task.

        If there is a `first`, the mean of its first examples and the mean of the others, which have
        joined it, count alike.
        """
        n = len(leaves(y)[0])
        one_x, one_y = (tree_map(lambda leaf: leaf[None], part) for part in (x, y))
        stack = cls(one_x, one_y, (n,), None if mask is None else mask[None], tasks=(t,))
        if first is not None:
            stack.shares[:, :first] = 1 / (2 * first)
            stack.shares[:, first:] = 1 / (2 * (n - first))
        return stack

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, which: slice) -> Stack:
        masks = None if self.masks is None else self.masks[which]
        return Stack(
            take(self.x, which),
            take(self.y, which),
            self.counts[which],
            masks,
            self.shares[which],
            self.tasks[which],
        )

    def drawn(self, n: int, generator: torch.Generator | None = None) -> Stack:
        """At most n examples of each task, without replacement: a copy.

        They are drawn by a generator of the host's; by the global one if none is given.
        """
        k, m = self.room
        if n >= m:
            return self
        filled = torch.arange(m) < torch.tensor(self.counts)[:, None]
        order = torch.where(filled, torch.rand(k, m, generator=generator), 2.0)
        slots = order.argsort(1)[:, :n]  # the filled ones first
        device = self.shares.device
        which = (torch.arange(k, device=device)[:, None], copy_to(slots, device))
        fewer = tuple(min(count, n) for count in self.counts)
        x, y = take(self.x, which), take(self.y, which)
        return Stack(x, y, fewer, self.masks, tasks=self.tasks)

    def having(self, x: Tree, y: Tree, shares: Tensor) -> Stack:
        """The same tasks with as many others of their examples: (k, n, …), and their `shares`."""
        fewer = tuple(min(count, shares.shape[1]) for count in self.counts)
        return Stack(x, y, fewer, self.masks, shares, self.tasks)

    def rows(self, which: Sequence[int]) -> Stack:
        """Some of the tasks, next to each other: a copy."""
        index = torch.tensor(which, device=self.shares.device)
        return Stack(
            take(self.x, index),
            take(self.y, index),
            tuple(self.counts[i] for i in which),
            None if self.masks is None else self.masks[index],
            self.shares[index],
            tuple(self.tasks[i] for i in which),
        )

    @property
    def room(self) -> tuple[int, int]:
        """Tasks k and slots of each m."""
        k, m = self.shares.shape
        return k, m

    @property
    def masks_by_slot(self) -> Tensor | None:
        """The masks, to go with outputs (k, m, classes)."""
        return self.masks if self.masks is None or self.masks.ndim == 3 else self.masks[:, None]

    @property
    def flat_x(self) -> Tree:
        """All slots of all tasks in one row: (k·m, …)."""
        return tree_map(lambda leaf: leaf.flatten(0, 1), self.x)

    @property
    def flat_y(self) -> Tree:
        """The same of y."""
        return tree_map(lambda leaf: leaf.flatten(0, 1), self.y)

    @cached_property
    def key(self) -> tuple[int, ...]:
        """Equal for stacks at the same addresses with as many examples: what a graph refers to."""
        masks = 0 if self.masks is None else self.masks.data_ptr()
        addresses = (leaf.data_ptr() for leaf in (*leaves(self.x), *leaves(self.y)))
        return (*addresses, masks, *self.room, *self.counts)

    def level(self) -> Iterator[Stack]:
        """Neighbouring tasks with equally many examples, without the slots that are not filled."""
        start = 0
        for count, same in groupby(self.counts):
            part = self[start : start + len(list(same))]
            start += len(part)
            filled = (slice(None), slice(count))
            x, y = take(part.x, filled), take(part.y, filled)
            yield Stack(x, y, part.counts, part.masks, part.shares[:, :count], part.tasks)
