"""Keep examples that were hard: a random sample in which the loss is the weight."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

import torch
from torch import Generator, Tensor

from gradmem.memory.policies.offer import Offer
from gradmem.memory.policies.policy import Policy, Row, positions

__all__ = ["LossWeighted"]

#: The least weight: an example without loss may still be drawn.
LEAST = 1e-9
#: How many of the smallest keys are found at once.
SOME = 1024


class LossWeighted(Policy):
    """A random sample without replacement, each example weighted by its loss when it arrived.

    Each example has the key log(u)/loss for a random u, and those with the largest keys are kept.
    The loss is that of the network after it learned from the example's mini-batch. On a GPU, every
    mini-batch waits for its losses.

    References
    ----------
    Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006.
    """

    name = "loss"

    def check(self, offer: Offer) -> None:
        if not offer.has_losses:
            raise ValueError(
                'keep="loss" needs the losses of examples: use the memory in a learner or a '
                "GradientMemory, or give it memory.attach(losses=…)"
            )

    def places(self, row: Row, n: int, generator: Generator) -> Iterator[tuple[slice, int]]:
        losses = row.offered.losses().clamp(min=LEAST)
        chances = torch.rand(n, dtype=torch.float64, generator=generator).clamp(min=1e-300)
        keys = chances.log() / losses
        own = row.slot_numbers("key", keys)
        free = min(n, row.size - row.count)
        if free:
            own[row.count : row.count + free] = keys[:free]
            row.cache.clear()
            yield slice(0, free), row.count
        for i, key in enumerate(keys[free:].tolist(), start=free):
            least, slot = _least(row, own)[0]
            if key > least:
                self._replace(row, own, slot, key)
                yield slice(i, i + 1), slot

    def _replace(self, row: Row, own: Tensor, slot: int, key: float) -> None:
        """Give the slot with the smallest key another one."""
        own[slot] = key
        least, bound = row.cache["least"], row.cache["bound"]
        if key <= bound:
            heapreplace(least, (key, slot))
        else:
            heappop(least)

    def kept(self, row: Row, size: int, generator: Generator) -> Tensor:
        keys = row.slots["key"][: row.count]
        return positions(keys.topk(min(size, len(keys)), sorted=False).indices, row.count)


def _least(row: Row, own: Tensor) -> list[tuple[float, int]]:
    """A heap of (key, slot): some of the smallest keys, so that few looks at all are needed.

    All keys that are not in it are larger than `row.cache["bound"]`, or as large.
    """
    if not row.cache.get("least"):
        keys, slots = own.topk(min(SOME, len(own)), largest=False, sorted=False)
        row.cache["bound"] = float(keys.max())
        row.cache["least"] = list(zip(keys.tolist(), slots.tolist(), strict=True))
        heapify(row.cache["least"])
    found: list[tuple[float, int]] = row.cache["least"]
    return found
