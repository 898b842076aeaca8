"""The memories of several tasks as one problem: x (k, m, …), y (k, m)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from gradmem.cuda.devices import has_triton

__all__ = ["Stack", "exact", "masked"]


def exact(x: Tensor) -> torch.dtype:
    """The type that an example's share in the loss has: no coarser than the example."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits (…, classes) without the outputs that are not in the mask, if there is one."""
    return logits if mask is None else logits.masked_fill(~mask, float("-inf"))


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
            k, m = self.y.shape
            if self.counts == (m,) * k:
                shares = torch.full((k, m), 1 / m, dtype=exact(self.x), device=self.y.device)
            else:
                counts = torch.tensor(self.counts)[:, None]
                parts = (torch.arange(m) < counts).to(exact(self.x)) / counts
                shares = parts.to(self.y.device)
            object.__setattr__(self, "shares", shares)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, which: slice) -> Stack:
        masks = None if self.masks is None else self.masks[which]
        shares = None if self.shares is None else self.shares[which]
        return Stack(self.x[which], self.y[which], self.counts[which], masks, shares)

    @cached_property
    def key(self) -> tuple[int, ...]:
        """The same for stacks that lie in the same place with as many examples and their masks."""
        masks = 0 if self.masks is None else self.masks.data_ptr()
        return (self.x.data_ptr(), self.y.data_ptr(), masks, *self.counts)

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

    def slopes(self, logits: Tensor, out: Tensor) -> None:
        """Write the gradient of the losses' sum by the logits (k, m, classes) into out."""
        assert self.shares is not None
        if logits.is_cuda and logits.dtype == torch.float32 and has_triton():
            from gradmem.gradients.device import softmax_slopes

            flat = self._masked(logits).flatten(0, 1)
            softmax_slopes(flat, self.y.flatten(), self.shares.flatten(), out)
            return
        torch.softmax(self._masked(logits).flatten(0, 1), 1, out=out)
        one = out.new_full((), -1.0).expand(len(out), 1)
        out.scatter_add_(1, self.y.reshape(-1, 1), one)
        out.mul_(self.shares.to(out.dtype).reshape(-1, 1))

    def _masked(self, logits: Tensor) -> Tensor:
        return masked(logits, None if self.masks is None else self.masks[:, None])
