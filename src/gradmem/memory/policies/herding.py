"""Keep examples whose mean is close to the mean of all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from gradmem.memory.policies.policy import Policy, Row

__all__ = ["Herding"]

#: Most rounds in which a row gives up examples: each looks at all of them.
ROUNDS = 256


class Herding(Policy):
    """Examples whose mean features are as close as may be to the mean of all that were seen.

    A new example takes the place of the one whose exchange brings the two means closest, if any
    does. Features are those of the time when an example arrived (see `Offer.features`). A new
    example takes O(m·d) for m slots and d features. On a GPU, every mini-batch waits for its
    features.

    References
    ----------
    Welling, Herding Dynamical Weights to Learn, ICML 2009; Rebuffi et al., iCaRL, CVPR 2017.
    """

    name = "herding"

    def places(self, row: Row, n: int, generator: Generator) -> Iterator[tuple[slice, int]]:
        features = row.offered.features()
        own = row.slot_numbers("features", features)
        total = _total(row, features)
        free = min(n, row.size - row.count)
        if free:
            own[row.count : row.count + free] = features[:free]
            total += features[:free].sum(0)
            yield slice(0, free), row.count
        if free == n:
            return
        here, squares = own.double().sum(0), own.square().sum(1)
        for i, f in enumerate(features[free:], start=free):
            total += f
            target = total * (row.size / (row.seen + i + 1))
            residual = (here + f - target).float()
            # |here − F_j + f − target|², without what is the same for all slots j
            costs = squares - 2 * (own @ residual)
            j = int(costs.argmin())
            if residual.double().square().sum() + costs[j] < (here - target).square().sum():
                here += f.double() - own[j].double()
                own[j], squares[j] = f, f.square().sum()
                yield slice(i, i + 1), j

    def kept(self, row: Row, size: int, generator: Generator) -> Tensor:
        own = row.slots["features"][: row.count]
        mean = (row.totals["features"] / row.seen).float()
        stays, squares = torch.ones(len(own), dtype=torch.bool), own.square().sum(1)
        left = len(own)
        at_once = -(-(left - size) // ROUNDS)
        while left > size:
            n = min(at_once, left - size)
            # |Σ kept − F_j − (left − n)·mean|², without what is the same for all j
            residual = own[stays].sum(0) - (left - n) * mean
            costs = (squares - 2 * (own @ residual)).masked_fill(~stays, torch.inf)
            stays[costs.topk(n, largest=False).indices] = False
            left -= n
        return stays.nonzero()[:, 0]


def _total(row: Row, features: Tensor) -> Tensor:
    """The sum of the features of all examples seen: (d,)."""
    total = row.totals.get("features")
    if total is None or len(total) != features.shape[1]:
        total = row.totals["features"] = torch.zeros(features.shape[1], dtype=torch.float64)
    return total
