"""What a policy answers: which examples of a task are kept, and in which slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Generator, Tensor

__all__ = ["Policy", "Row"]


@dataclass
class Row:
    """One task's slots: `count` of `size` are filled, `seen` examples were observed in all.

    `oldest` is the slot with which the order of the examples begins.
    """

    size: int
    count: int = 0
    seen: int = 0
    oldest: int = 0


class Policy(ABC):
    """Which examples of a task are kept. One small class per file, named in `POLICIES`."""

    #: What it is called in `EpisodicMemory(keep=…)` and in a saved state.
    name: str

    @abstractmethod
    def places(self, row: Row, n: int, generator: Generator) -> Iterable[tuple[slice, int]]:
        """Where the next n examples go: slices of them, each with the slot it is written from.

        Free slots are filled in order. `row` is as it was before these examples; the caller raises
        its counts. Examples are as old as their slots are far from `row.oldest`, going around: a
        policy that overwrites the oldest moves `row.oldest` on itself. Random numbers come from
        `generator`, on the CPU.
        """

    @abstractmethod
    def kept(self, row: Row, size: int, generator: Generator) -> slice | Tensor:
        """Which examples stay, by age with the oldest first, when a row shrinks to `size`."""
