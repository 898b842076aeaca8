"""The memories of several tasks as one problem: x (k, m, …), y (k, m)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Stack"]


@dataclass(frozen=True)
class Stack:
    """Memories of k tasks, each with room for m examples.

    Attributes
    ----------
    x, y
        (k, m, …) and (k, m). Slots that are not filled yet repeat an observed example.
    counts
        How many slots of each task are filled; only these count.
    masks
        (k, classes): which outputs belong to the task; None if all do.
    """

    x: Tensor
    y: Tensor
    counts: tuple[int, ...]
    masks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, which: slice) -> Stack:
        masks = None if self.masks is None else self.masks[which]
        return Stack(self.x[which], self.y[which], self.counts[which], masks)

    def chunks(self, size: int) -> Iterator[Stack]:
        """At most `size` tasks at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def level(self) -> Iterator[Stack]:
        """Neighbouring tasks with equally many examples, without the slots that are not filled."""
        start = 0
        for count, same in groupby(self.counts):
            part = self[start : start + len(list(same))]
            start += len(part)
            yield Stack(part.x[:, :count], part.y[:, :count], part.counts, part.masks)

    def losses(self, logits: Tensor) -> Tensor:
        """The mean loss at each task's memories (equation 5): (k,) from logits (k, m, classes)."""
        losses = F.cross_entropy(
            self._masked(logits).flatten(0, 1), self.y.flatten(), reduction="none"
        )
        return (losses.view(self.y.shape) * self._shares(losses)).sum(1)

    def slopes(self, logits: Tensor) -> Tensor:
        """The gradient of the losses' sum by the logits: (k, m, classes)."""
        slopes = self._masked(logits).softmax(2)
        slopes.scatter_add_(
            2, self.y[:, :, None], slopes.new_full((), -1.0).expand(*self.y.shape, 1)
        )
        return slopes.mul_(self._shares(slopes)[:, :, None])

    def _masked(self, logits: Tensor) -> Tensor:
        if self.masks is None:
            return logits
        return logits.masked_fill(~self.masks[:, None], float("-inf"))

    def _shares(self, like: Tensor) -> Tensor:
        """What each example counts in its task's mean: (k, m), or one number for all, (1, 1)."""
        k, m = self.y.shape
        if self.counts == (m,) * k:
            return like.new_full((1, 1), 1 / m)
        counts = torch.tensor(self.counts, dtype=like.dtype, device=like.device)[:, None]
        filled = torch.arange(m, device=like.device) < counts
        return filled / counts
