"""Keep equally many examples of each class, a uniform sample of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from gradmem.memory.policies.offer import Offer
from gradmem.memory.policies.policy import Policy, Row

__all__ = ["Balanced"]


class Balanced(Policy):
    """As many examples of each class as of any other, as far as there are so many.

    A new example of a class that is not yet among the largest takes the place of an example of the
    largest class; within a class, every example seen is kept with the same probability. For class
    ids only. On a GPU, every mini-batch waits for its labels.

    References
    ----------
    Chrysakis and Moens, Online Continual Learning from Imbalanced Data, ICML 2020.
    """

    name = "balanced"

    def check(self, offer: Offer) -> None:
        y = offer.y
        if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.is_complex():
            got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f'keep="balanced" needs class ids y: (n,) as integers, got {got}')

    def places(self, row: Row, n: int, generator: Generator) -> Iterator[tuple[slice, int]]:
        classes = row.offered.y.detach().cpu().long()
        own = row.slot_numbers("class", classes)
        count = row.count
        kept = _counts(own[:count])
        for i, c in enumerate(classes.tolist()):
            seen = row.totals.get(f"seen {c}", torch.zeros((), dtype=torch.long)) + 1
            row.totals[f"seen {c}"] = seen
            if count < row.size:
                slot, count = count, count + 1
            else:
                slot = self._slot(own, kept, c, int(seen), generator)
                if slot < 0:
                    continue
                kept[int(own[slot])] -= 1
            own[slot] = c
            kept[c] = kept.get(c, 0) + 1
            yield slice(i, i + 1), slot

    def _slot(
        self, own: Tensor, kept: dict[int, int], c: int, seen: int, generator: Generator
    ) -> int:
        """The slot that the newest of `seen` examples of class c takes; −1 for none."""
        mine, most = kept.get(c, 0), max(kept.values())
        if mine == most or mine < seen - 1:  # a uniform sample of the class's own
            if _below(seen, generator) >= mine:
                return -1
            instead = c
        else:
            instead = min(other for other, k in kept.items() if k == most)
        places = (own == instead).nonzero()[:, 0]
        return int(places[_below(len(places), generator)])

    def kept(self, row: Row, size: int, generator: Generator) -> Tensor:
        order = torch.randperm(row.count, generator=generator)
        classes = row.slots["class"][: row.count][order]
        by_class = order[classes.argsort(stable=True)]
        counts = torch.tensor([*_counts(classes).values()])
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        # of each class, in random order: first one example of each, then a second one, …
        rounds = (torch.arange(row.count) - starts).argsort(stable=True)
        return by_class[rounds[:size]].sort().values


def _counts(classes: Tensor) -> dict[int, int]:
    """Class → how many there are, in the order of class ids."""
    found, counts = classes.unique(return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _below(n: int, generator: Generator) -> int:
    """A random whole number below n."""
    return int(torch.rand((), dtype=torch.float64, generator=generator) * n)
