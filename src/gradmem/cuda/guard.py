"""Numbers that are not finite, noticed on a GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Guard"]


class Guard:
    """Keeps steps from changing anything, from the first one on that was not finite.

    The host learns of it when it looks, with `read`. Until then optimizers of torch's fused kind do
    nothing, others step along zeros, and buffers are put back after each step.

    Parameters
    ----------
    device
        The GPU that the steps run on.
    """

    def __init__(self, device: torch.device) -> None:
        self.found = torch.zeros((), device=device)  # 1 from the first bad step on
        self._note = torch.zeros(2, dtype=torch.float64, device=device)  # steps since, its loss

    def look(self, loss: Tensor, size: Tensor) -> None:
        """Look at a step's loss: () and a sum over its gradients: ()."""
        _look[(1,)](loss, size, self.found, self._note)

    def hold(self, optimizers: Iterable[Optimizer]) -> None:
        """Keep optimizers from stepping along gradients that are not to be used."""
        for optimizer in optimizers:
            if _can_be_held(optimizer):
                optimizer.found_inf = self.found  # type: ignore[attr-defined]
                continue
            bad = self.found.bool()
            for gradient in (w.grad for w in _weights(optimizer) if w.grad is not None):
                gradient.masked_fill_(bad, 0.0)

    def copies(self, buffers: Iterable[Tensor]) -> dict[torch.dtype, Tensor]:
        """The buffers' elements, those of a type in one row."""
        return {dtype: _joined(some) for dtype, some in _by_type(buffers).items()}

    def put_back(self, buffers: Iterable[Tensor], before: dict[torch.dtype, Tensor]) -> None:
        """Put buffers back to what `copies` gave for them, if the step was not finite."""
        for dtype, some in _by_type(buffers).items():
            rows = torch.where(self.found.bool(), before[dtype], _joined(some))
            parts = rows.split([buffer.numel() for buffer in some])
            torch._foreach_copy_(
                some, [part.view_as(buffer) for part, buffer in zip(parts, some, strict=True)]
            )

    def read(self) -> tuple[int, float] | None:
        """Wait for the GPU; how many steps ago the first bad one was, and its loss; start anew."""
        if not bool(self.found.item()):
            return None
        late, loss = self._note.tolist()
        self.clear()
        return int(late), loss

    def clear(self) -> None:
        """Forget what was found."""
        self.found.zero_()
        self._note.zero_()


def _can_be_held(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves a step out where a tensor on the device says so.

    Torch's fused steps do, for gradients that lie in memory as their parameters do; elsewhere
    another kind of step is chosen. Torch's SGD does not fill its momentum in a first step that is
    left out.
    """
    groups = optimizer.param_groups
    if not all(group.get("fused") for group in groups):
        return False
    pairs = [(w, w.grad) for w in _weights(optimizer) if w.grad is not None]
    if any(w.stride() != grad.stride() or w.dtype != grad.dtype for w, grad in pairs):
        for group in groups:
            group["fused"] = False
        return False
    return bool(optimizer.state) or not any(group.get("momentum") for group in groups)


def _weights(optimizer: Optimizer) -> list[Tensor]:
    return [w for group in optimizer.param_groups for w in group["params"]]


def _by_type(buffers: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        found.setdefault(buffer.dtype, []).append(buffer.detach())
    return found


def _joined(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in buffers])


@triton.jit
def _look(loss, size, found, note):
    value = tl.load(loss).to(tl.float64)
    total = tl.load(size).to(tl.float64) + value
    before = tl.load(found)
    bad = (total - total != 0.0) | (before != 0.0)
    if bad:
        if before == 0.0:
            tl.store(note + 1, value)
        tl.store(found, 1.0)
        tl.store(note, tl.load(note) + 1.0)
