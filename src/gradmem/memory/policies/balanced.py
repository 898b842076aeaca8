"""Keep equally many examples of each class, a uniform sample of each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Generator, Tensor

from gradmem.memory.policies.offer import Offer
from gradmem.memory.policies.policy import Policy, Row, positions

__all__ = ["Balanced"]

#: Slots that are drawn at once to find one of a class, and how often before all are looked at.
DRAWN, TRIES = 64, 16


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
        y = offer.labels
        if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.is_complex():
            got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f'keep="balanced" needs class ids y: (n,) as integers, got {got}')

    def places(self, row: Row, n: int, generator: Generator) -> Iterator[tuple[slice, int]]:
        classes = row.offered.labels.detach().cpu().long()
        own = row.slot_numbers("class", classes)
        count = row.count
        if "kept" not in row.cache:
            row.cache["kept"] = _counts(own[:count])
        kept = row.cache["kept"]
        for i, c in enumerate(classes.tolist()):
            seen = row.totals.get(f"seen {c}", torch.zeros((), dtype=torch.long)) + 1
            row.totals[f"seen {c}"] = seen
            if count < row.size:
                slot, count = count, count + 1
            else:
                instead = self._instead(kept, c, int(seen), generator)
                if instead is None:
                    continue
                slot = _one_of(own, instead, generator)
                kept[instead] -= 1
            own[slot] = c
            kept[c] = kept.get(c, 0) + 1
            yield slice(i, i + 1), slot

    def _instead(self, kept: dict[int, int], c: int, seen: int, generator: Generator) -> int | None:
        """The class that gives a slot to the newest of `seen` examples of class c, if any does."""
        mine, most = kept.get(c, 0), max(kept.values())
        if mine == most or mine < seen - 1:  # a uniform sample of the class's own
            return c if int(_random(1, generator) * seen) < mine else None
        return min(other for other, n in kept.items() if n == most)

    def kept(self, row: Row, size: int, generator: Generator) -> Tensor:
        ids = row.slots["class"][: row.count]
        counts = torch.tensor([*_counts(ids).values()])
        slots = torch.from_numpy(np.argsort(_short(ids).numpy(), kind="stable"))
        some = [
            own if n == len(own) else own[torch.randperm(len(own), generator=generator)[:n]]
            for own, n in zip(
                slots.split(counts.tolist()), _equal_parts(counts, size).tolist(), strict=True
            )
        ]
        return positions(torch.cat(some), row.count)


def _equal_parts(counts: Tensor, size: int) -> Tensor:
    """How many of each class stay if `size` are to stay in all, as equally many as may be."""
    low, high = 0, int(counts.max())
    while low < high:  # the largest number that each class may keep without being too many
        middle = (low + high + 1) // 2
        if int(counts.clamp(max=middle).sum()) <= size:
            low = middle
        else:
            high = middle - 1
    parts = counts.clamp(max=low)
    more = (counts > low).nonzero()[:, 0][: size - int(parts.sum())]
    parts[more] += 1
    return parts


def _one_of(own: Tensor, c: int, generator: Generator) -> int:
    """A random slot of class c: of slots that are drawn, the first one that is."""
    for _ in range(TRIES):
        slots = (_random(DRAWN, generator) * len(own)).long()
        found = (own[slots] == c).nonzero()
        if len(found):
            return int(slots[found[0, 0]])
    places = (own == c).nonzero()[:, 0]
    return int(places[int(_random(1, generator) * len(places))])


def _counts(ids: Tensor) -> dict[int, int]:
    """Class → how many there are, in the order of their ids."""
    if not len(ids):
        return {}
    short = _short(ids)
    if short.dtype == torch.int16:
        counts, first = short.int().bincount(), int(ids.min())
        found = counts.nonzero()[:, 0]
        return dict(zip((found + first).tolist(), counts[found].tolist(), strict=True))
    found, counts = ids.unique(return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _short(ids: Tensor) -> Tensor:
    """Class ids from zero on in two bytes, which sort in O(n); as they are if that is too few."""
    low, high = (int(end) for end in ids.aminmax())
    return (ids - low).short() if high - low < 2**15 else ids


def _random(n: int, generator: Generator) -> Tensor:
    return torch.rand(n, dtype=torch.float64, generator=generator)
