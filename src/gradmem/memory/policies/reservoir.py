"""Keep a uniform sample of a task's examples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from gradmem.memory.policies.policy import Policy, Row, positions

__all__ = ["Reservoir"]


class Reservoir(Policy):
    """Every example observed so far is kept with the same probability.

    References
    ----------
    Vitter, Random Sampling with a Reservoir, 1985.
    """

    name = "reservoir"

    def places(self, row: Row, n: int, generator: Generator) -> Iterator[tuple[slice, int]]:
        free = min(n, row.size - row.count)
        if free:
            yield slice(0, free), row.count
        seen = row.seen + torch.arange(free + 1, n + 1)  # with the example itself
        slots = (torch.rand(n - free, dtype=torch.float64, generator=generator) * seen).long()
        for i, slot in enumerate(slots.tolist(), start=free):
            if slot < row.size:
                yield slice(i, i + 1), slot

    def kept(self, row: Row, size: int, generator: Generator) -> Tensor:
        return positions(torch.randperm(row.count, generator=generator)[:size], row.count)
