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
    shares
        (k, m): what each example counts in its task's mean, 1/count or 0; made if left out.
    """

    x: Tensor
    y: Tensor
    counts: tuple[int, ...]
    masks: Tensor | None = None
    shares: Tensor | None = None

    def __post_init__(self) -> None:
        if self.shares is None:
            counts = torch.tensor(self.counts)[:, None]
            filled = torch.arange(self.y.shape[1]) < counts
            shares = (filled / counts).to(self.y.device)
            object.__setattr__(self, "shares", shares)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, which: slice) -> Stack:
        masks = None if self.masks is None else self.masks[which]
        shares = None if self.shares is None else self.shares[which]
        return Stack(self.x[which], self.y[which], self.counts[which], masks, shares)

    @property
    def key(self) -> tuple[int, ...]:
        """The same for stacks that lie in the same place with as many examples."""
        return (self.x.data_ptr(), self.y.data_ptr(), *self.counts)

    def level(self) -> Iterator[Stack]:
        """Neighbouring tasks with equally many examples, without the slots that are not filled."""
        start = 0
        for count, same in groupby(self.counts):
            part = self[start : start + len(list(same))]
            start += len(part)
            shares = None if part.shares is None else part.shares[:, :count]
            yield Stack(part.x[:, :count], part.y[:, :count], part.counts, part.masks, shares)

    def losses(self, logits: Tensor) -> Tensor:
        """The mean loss at each task's memories (equation 5): (k,) from logits (k, m, classes)."""
        losses = F.cross_entropy(
            self._masked(logits).flatten(0, 1), self.y.flatten(), reduction="none"
        )
        assert self.shares is not None
        return (losses.view(self.y.shape) * self.shares.to(losses.dtype)).sum(1)

    def slopes(self, logits: Tensor) -> Tensor:
        """The gradient of the losses' sum by the logits: (k, m, classes)."""
        slopes = self._masked(logits).softmax(2)
        one = slopes.new_full((), -1.0).expand(*self.y.shape, 1)
        slopes.scatter_add_(2, self.y[:, :, None], one)
        assert self.shares is not None
        return slopes.mul_(self.shares.to(slopes.dtype)[:, :, None])

    def _masked(self, logits: Tensor) -> Tensor:
        if self.masks is None:
            return logits
        return logits.masked_fill(~self.masks[:, None], float("-inf"))
