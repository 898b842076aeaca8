"""Keep examples that were hard: a random sample in which the loss is the weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from gradmem.memory.policies.offer import Offer
from gradmem.memory.policies.policy import Policy, Row

__all__ = ["LossWeighted"]

#: The least weight: an example without loss may still be drawn.
LEAST = 1e-9


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
            yield slice(0, free), row.count
        least = own.min() if free < n else None
        for i, key in enumerate(keys[free:], start=free):
            if key > least:
                slot = int(own.argmin())
                own[slot] = key
                least = own.min()
                yield slice(i, i + 1), slot

    def kept(self, row: Row, size: int, generator: Generator) -> Tensor:
        keys = row.slots["key"][: row.count]
        return keys.topk(min(size, len(keys))).indices.sort().values
