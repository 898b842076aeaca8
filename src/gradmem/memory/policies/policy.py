"""What a policy answers: which examples of a task are kept, and in which slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from gradmem.memory.policies.offer import Offer

__all__ = ["Policy", "Row", "positions"]


@dataclass
class Row:
    """One task's slots, or those of several tasks that share them.

    Attributes
    ----------
    size, count
        Slots, and how many of them are filled.
    seen
        Examples observed in all.
    oldest
        The slot with which the order of the examples begins.
    offer
        The examples that `Policy.places` is asked about.
    slots
        A policy's own numbers for each slot: name → tensor (size, …) on the CPU. They are saved,
        and follow the examples when a row shrinks or two rows become one.
    totals
        A policy's own sums over all examples seen: name → tensor on the CPU. They are saved, and
        added up when two rows become one.
    cache
        What a policy worked out from `slots` and does not want to work out again. It is emptied
        whenever the examples change other than by `Policy.places`, and not saved.
    tasks
        The tasks whose examples these are, in the order in which they were first observed.
    place, padded
        The row's place among rows of its kind, and whether slots that are not filled can be
        computed with.
    """

    size: int
    count: int = 0
    seen: int = 0
    oldest: int = 0
    offer: Offer | None = None
    slots: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    tasks: list[Hashable] = field(default_factory=list)
    place: int = 0
    padded: bool = False

    @property
    def start(self) -> int:
        """Where the row's slots begin, among those of all rows of its kind."""
        return self.place * self.size

    @property
    def offered(self) -> Offer:
        """The offer, where there is one for certain."""
        assert self.offer is not None, "examples are offered before places() is called"
        return self.offer

    def slot_numbers(self, name: str, like: Tensor) -> Tensor:
        """`slots[name]`, made of zeros if it is not there; `like` is (n, …), the same of examples.

        Numbers of another width, of features since a layer was replaced, are begun again.
        """
        numbers = self.slots.get(name)
        if numbers is None or numbers.shape[1:] != like.shape[1:]:
            numbers = self.slots[name] = like.new_zeros((self.size, *like.shape[1:]))
        return numbers


class Policy(ABC):
    """Which examples of a task are kept. One small class per file, named in `POLICIES`."""

    #: What it is called in `EpisodicMemory(keep=…)` and in a saved state.
    name: str
    #: Whether many examples can be offered at once, with the same outcome as a few at a time.
    takes_many = False

    def check(self, offer: Offer) -> None:
        """Raise ValueError if examples such as these cannot be kept by this policy."""
        del offer  # any will do, unless a policy says so

    @abstractmethod
    def places(self, row: Row, n: int, generator: Generator) -> Iterable[tuple[slice, int]]:
        """Where the next n examples go: slices of them, each with the slot it is written from.

        Free slots are filled in order. `row` is as it was before these examples; the caller raises
        its counts. Examples are as old as their slots are far from `row.oldest`, going around: a
        policy that overwrites the oldest moves `row.oldest` on itself. Random numbers come from
        `generator`, on the CPU. `row.offer` has the labels, features and losses of the examples;
        what a policy notes about its slots goes into `row.slots`.
        """

    @abstractmethod
    def kept(self, row: Row, size: int, generator: Generator) -> slice | Tensor:
        """Which examples stay, by age with the oldest first, when a row shrinks to `size`.

        `row.slots` are in the order of age here.
        """

    def joined(self, row: Row) -> None:
        """Adapt `row.slots` of a row that was made of two, one after the other."""
        del row  # nothing in them depends on other examples, unless a policy says so


def positions(chosen: Tensor, count: int) -> Tensor:
    """Different positions below `count` in ascending order, faster than they can be sorted."""
    stays = torch.zeros(count, dtype=torch.bool)
    stays[chosen] = True
    return stays.nonzero()[:, 0]
