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
        if self.masks is not None:
            logits = logits.masked_fill(~self.masks[:, None], float("-inf"))
        k, m = self.y.shape
        losses = F.cross_entropy(logits.flatten(0, 1), self.y.flatten(), reduction="none")
        losses = losses.view(k, m)
        if self.counts == (m,) * k:
            return losses.mean(1)
        counts = torch.tensor(self.counts, device=losses.device)[:, None]
        filled = torch.arange(m, device=losses.device) < counts
        return torch.where(filled, losses / counts, 0.0).sum(1)
