"""GGᵀ, Gg and Gᵀv of few tasks, with few rows of G at a time.

One task's pass comes after another, as in a plain loop, and few rows of G are held: `ROOM`, or of a
large network of which few parameters learn, as many as take the memory of `ROOM` copies of it.
The first time through all tasks gives Gg: if no constraint is violated, that is all there is to
know. If one is, tasks whose rows were not held at the same time are gone through again, until all
pairs have met; for Gᵀv, those with a weight whose rows are gone at the end. With 7 tasks and 5 rows
that is 11 passes at most, with 9 it is 17: two for each task. From there on the passes side by side
of `gram.py` cost less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradmem.cuda.devices import current_device
from gradmem.gradients.again import Restore, buffers_put_back, drawn_again
from gradmem.gradients.flat import parameters, split
from gradmem.gradients.loop import Pass, batches_of, pass_of
from gradmem.gradients.objective import Objective
from gradmem.gradients.precision import computing_in
from gradmem.memory.stack import Stack
from gradmem.projection.blocks import products_with

__all__ = ["ROOM", "TaskByTask", "passes"]

#: Rows of G that are held where all parameters learn.
ROOM = 5


class Schedule(NamedTuple):
    """What is gone through after the first time, if a constraint is violated.

    Attributes
    ----------
    rest
        (task, place of its row) until all pairs of tasks have met.
    gone
        The tasks whose rows are not held after that.
    """

    rest: tuple[tuple[int, int], ...]
    gone: tuple[int, ...]


def passes(k: int, room: int = ROOM) -> int:
    """How many passes a step with k tasks takes at most if it violates a constraint.

    Examples
    --------
    >>> [passes(k) for k in (3, 5, 7, 9)]
    [3, 5, 11, 17]
    """
    return k if k <= room else k + sum(map(len, schedule(k, room)))


@cache
def schedule(k: int, room: int = ROOM) -> Schedule:
    """How k tasks are gone through, with room for so many rows, after they were once.

    By then the first of them have met all others, and the last one is in the last place.
    """
    held: dict[int, int] = {}  # task → place, in the order in which they came
    met = [{i} for i in range(k)]

    def go_through(tasks: Iterable[int]) -> Iterator[tuple[int, int]]:
        for i in tasks:
            if i in held:
                continue
            if len(held) < room:
                place = len(held)
            else:  # a row that has met all others is gone first, then the newest
                done = [j for j in held if len(met[j]) == k]
                place = held.pop(done[0] if done else list(held)[-1])
            held[i] = place
            for j in held:
                met[i].add(j)
                met[j].add(i)
            yield i, place

    rest: list[tuple[int, int]] = []
    assert [*go_through(range(k))] == [*once_through(k, room)]
    while missing := [i for i in range(k) if len(met[i]) < k]:
        rest += go_through(missing)
    return Schedule(tuple(rest), tuple(i for i in range(k) if i not in held))


def once_through(k: int, room: int) -> Iterator[tuple[int, int]]:
    """All tasks with the places of their rows: those without a place of their own have the last."""
    return ((i, min(i, room - 1)) for i in range(k))


class TaskByTask:
    """The gradients at few tasks' memories, at the parameters as they are.

    Parameters
    ----------
    objective
        The loss that is differentiated.
    stacks
        The tasks' memories.
    precision
        Of the passes; see `MemoryGradients`. Inner products are summed in double precision.
    one_pass
        Makes a pass over one task's memories.
    room
        Rows of G that are held: at least 2, or 1 for `look` alone.
    """

    def __init__(
        self,
        objective: Objective,
        stacks: Sequence[Stack],
        precision: str = "fp32",
        one_pass: Pass = pass_of,
        room: int = ROOM,
    ) -> None:
        self.objective, self.precision, self.one_pass = objective, precision, one_pass
        self.weights = parameters(objective.network)
        self._batches = [batch for stack in stacks for batch in batches_of(stack)]
        self._room = room
        self._left_out: set[int] = set()
        self._z: Tensor | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def leave_out(self, weights: Iterable[nn.Parameter]) -> None:
        """Take these parameters' gradients as zero."""
        self._left_out = {id(w) for w in weights}

    def square(self, z: Tensor) -> Tensor:
        """|z|²: () in double precision."""
        length: Tensor = torch.linalg.vector_norm(z, dtype=torch.float64)
        return length.square()

    def look(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Gz and the rows' squares: (k,) each, in double precision, for z: (p,)."""
        if self._z is not z:
            k = len(self)
            self._z, self._is_whole = z, False
            self._rows = z.new_empty((min(k, self._room), len(z)))
            self._owners: dict[int, int] = {}  # place → task
            self._again: dict[int, Restore] = {}  # draws a task's random numbers again
            self._GGt, self._Gz = (
                torch.zeros(shape, dtype=torch.float64, device=z.device) for shape in ((k, k), k)
            )
            self._go_through(once_through(k, self._room), z)
        return self._Gz, self._GGt.diagonal()

    def products(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """GGᵀ: (k, k) and Gz: (k,) for z: (p,), summed in double precision."""
        self.look(z)
        if not self._is_whole:
            if len(self) > self._room:
                self._go_through(schedule(len(self), self._room).rest, None)
            self._is_whole = True
        return self._GGt, self._Gz

    def _go_through(self, steps: Iterable[tuple[int, int]], z: Tensor | None) -> None:
        for i, place in steps:
            row = self._pass(i, self._rows[place])
            self._owners[place] = i
            tasks = [self._owners[other] for other in range(len(self._owners))]
            with current_device(row.device):
                products = products_with(self._rows[: len(tasks)], row)
                self._GGt[i, tasks] = self._GGt[tasks, i] = products[:-1]
                self._GGt[i, i] = products[-1]
                if z is not None:
                    self._Gz[i] = products_with(row[None], z)[0]

    def _pass(self, i: int, row: Tensor) -> Tensor:
        """Write the gradient of a task into a row; the second time, with the same dropout."""
        with ExitStack() as blocks:
            if (again := self._again.get(i)) is None:
                self._again[i] = drawn_again(row.device)
            else:
                blocks.enter_context(again())
                blocks.enter_context(buffers_put_back(self.objective.network))
            blocks.enter_context(torch.enable_grad())
            blocks.enter_context(computing_in(self.precision, row.device))
            self.one_pass(self.objective, self._batches[i], row)
        if self._left_out:
            for w, part in zip(self.weights, split(row, self.weights), strict=True):
                if id(w) in self._left_out:
                    part.zero_()
        return row

    def combine(self, v: Tensor) -> Tensor:
        """The z that was asked for last, plus Gᵀv: (p,) for v: (k,)."""
        assert self._z is not None
        out, v = self._z.clone(), v.to(self._GGt)
        tasks = [self._owners[place] for place in range(len(self._owners))]
        shares = v[tasks].to(self._rows.dtype)
        with computing_in("fp32", out.device):  # whatever the caller computes in
            out += shares @ self._rows[: len(tasks)]
        for i in v.nonzero()[:, 0].tolist():
            if i not in tasks:  # the first place is needed no more: what was there is added
                row = self._pass(i, self._rows[0])
                self._owners[0] = i
                out.addcmul_(row, v[i].to(row.dtype))
        self._Gz = self._Gz + self._GGt @ v
        self._z = out
        return out
