"""Keep examples that lie far apart, so that every example seen has one nearby."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from gradmem.memory.policies.offer import Offer
from gradmem.memory.policies.policy import Policy, Row
from gradmem.validation import one_of

__all__ = ["KCentre"]


class KCentre(Policy):
    """Examples that lie far apart, by their features or gradients: centres of what was seen.

    A new example is kept if it is farther from all centres than the two closest centres are from
    each other; it takes the place of one of these two. Features and gradients are those of the time
    when an example arrived. A new example takes O(m·d) for m slots and d numbers; when a row
    shrinks by r examples that takes O(r·m·d). On a GPU, every mini-batch waits for them.

    Parameters
    ----------
    space
        "features" (see `Offer.features`), or "gradients": of each example's loss by the weights and
        the bias of the network's last linear layer, which are kept beside each example.

    References
    ----------
    Gonzalez, Clustering to Minimize the Maximum Intercluster Distance, 1985; Sener and Savarese,
    Active Learning for Convolutional Neural Networks: a Core-Set Approach, ICLR 2018.
    """

    name = "k-centre"

    def __init__(self, space: str = "features") -> None:
        self.by_gradients = one_of("space", space, ("features", "gradients")) == "gradients"
        if self.by_gradients:
            self.name = "k-centre of gradients"

    def check(self, offer: Offer) -> None:
        if self.by_gradients and not offer.has_gradients:
            raise ValueError(
                'KCentre("gradients") needs the gradients of examples: use the memory in a learner '
                "or a GradientMemory, or give it memory.attach(gradients=…)"
            )

    def places(self, row: Row, n: int, generator: Generator) -> Iterator[tuple[slice, int]]:
        features = row.offered.gradients() if self.by_gradients else row.offered.features()
        own = row.slot_numbers("features", features)
        # Of each centre, the squared distance to the nearest other, or less: a centre that was
        # nearest may be gone. What is less is corrected when it looks like the smallest.
        gaps = row.slot_numbers("gap", features[:, 0])
        count = row.count
        for i, f in enumerate(features):
            away = _distances(own[:count], f)
            if count < row.size:
                slot, count = count, count + 1
            elif away.min() <= gaps.min():
                continue
            else:
                slot = _in_closest_pair(own, gaps)
                if away.min() <= gaps[slot]:
                    continue
                away[slot] = torch.inf
            torch.minimum(gaps[: len(away)], away, out=gaps[: len(away)])
            gaps[slot] = away.min() if len(away) else torch.inf
            own[slot] = f
            yield slice(i, i + 1), slot

    def kept(self, row: Row, size: int, generator: Generator) -> Tensor:
        own = row.slots["features"][: row.count].clone()
        gaps = row.slots["gap"][: row.count].clone()
        stays = torch.ones(row.count, dtype=torch.bool)
        for _ in range(row.count - size):
            gone = _in_closest_pair(own, gaps)
            stays[gone], own[gone], gaps[gone] = False, torch.inf, torch.inf
        return stays.nonzero()[:, 0]

    def joined(self, row: Row) -> None:
        row.slots["gap"].zero_()  # a centre of the other row may be nearer


def _distances(own: Tensor, f: Tensor) -> Tensor:
    """Squared distances of centres (m, d) to one example (d,)."""
    return (own - f).square_().sum(1)


def _in_closest_pair(own: Tensor, gaps: Tensor) -> int:
    """The slot of one of the two centres that are closest, with its gap corrected."""
    while True:
        slot = int(gaps.argmin())
        away = _distances(own, own[slot])
        away[slot] = torch.inf
        nearest = away.min()
        if nearest <= gaps[slot]:
            return slot
        gaps[slot] = nearest
