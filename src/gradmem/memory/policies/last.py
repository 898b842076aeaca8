"""Keep a task's last examples (the paper's policy)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Generator

from gradmem.memory.policies.policy import Policy, Row

__all__ = ["Last"]


class Last(Policy):
    """The last examples, in a ring buffer: the newest replaces the oldest."""

    name = "last"
    takes_many = True

    def places(self, row: Row, n: int, generator: Generator) -> Iterator[tuple[slice, int]]:
        start = max(0, n - row.size)
        slot = (row.oldest + row.count + start) % row.size  # where one by one would have put it
        full = row.count + n >= row.size
        while start < n:
            stop = min(n, start + row.size - slot)
            yield slice(start, stop), slot
            slot = (slot + stop - start) % row.size
            start = stop
        row.oldest = slot if full else 0

    def kept(self, row: Row, size: int, generator: Generator) -> slice:
        return slice(max(0, row.count - size), row.count)
