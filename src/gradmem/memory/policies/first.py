"""Keep a task's first examples."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Generator

from gradmem.memory.policies.policy import Policy, Row

__all__ = ["First"]


class First(Policy):
    """The first examples; once there is no room, nothing is added."""

    name = "first"
    takes_many = True

    def places(self, row: Row, n: int, generator: Generator) -> Iterator[tuple[slice, int]]:
        if row.count < row.size:
            yield slice(0, min(n, row.size - row.count)), row.count

    def kept(self, row: Row, size: int, generator: Generator) -> slice:
        return slice(0, min(size, row.count))
