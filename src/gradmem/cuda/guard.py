"""Numbers that are not finite, noticed on a GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import SGD, Optimizer

__all__ = ["Guard"]

#: Gradients that a kernel looks at together, and their elements that a program looks at.
TOGETHER, BLOCK = 8, 2048


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
        self._bad = torch.zeros((), device=device)  # 1 if a gradient of this step is not finite
        self._note = torch.zeros(2, dtype=torch.float64, device=device)  # steps since, its loss

    def look(self, loss: Tensor, gradients: Sequence[Tensor]) -> None:
        """Look at a step's loss: () and all elements of its gradients."""
        parts = [dense for part in gradients if (dense := _dense(part)).numel()]
        for first in range(0, len(parts), TOGETHER):
            some = parts[first : first + TOGETHER]
            sizes = [part.numel() for part in some]
            rest = TOGETHER - len(some)
            _scan[(triton.cdiv(max(sizes), BLOCK), len(some))](
                self._bad, *some, *some[:1] * rest, *sizes, *[0] * rest, BLOCK=BLOCK
            )
        _look[(1,)](loss, self._bad, self.found, self._note)

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step, unless its gradients are not to be used."""
        if _is_plain(optimizer):
            for group in optimizer.param_groups:
                self._descend(group["lr"], [w for w in group["params"] if w.grad is not None])
            return
        if _can_be_held(optimizer):
            optimizer.found_inf = self.found  # type: ignore[attr-defined]
        else:
            bad = self.found.bool()
            for gradient in (w.grad for w in _weights(optimizer) if w.grad is not None):
                gradient.masked_fill_(bad, 0.0)
        optimizer.step()

    def _descend(self, rate: float | Tensor, weights: list[Tensor]) -> None:
        """Plain SGD, in a fifth of what torch's kernel takes with a block for 65,536 elements."""
        if not weights:
            return
        sizes, rest = [w.numel() for w in weights], TOGETHER - len(weights)
        gradients: list[Any] = [w.grad for w in weights]
        _step[(triton.cdiv(max(sizes), BLOCK), len(weights))](
            self.found, rate, *weights, *weights[:1] * rest, *gradients, *gradients[:1] * rest,
            *sizes, *[0] * rest, TENSOR=isinstance(rate, Tensor), BLOCK=BLOCK,
        )  # fmt: skip

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
        for tensor in (self.found, self._bad, self._note):
            tensor.zero_()


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether an optimizer does nothing but w − lr · gradient, for a few parameters."""
    if type(optimizer) is not SGD or "step" in vars(optimizer):  # a schedule watches its steps
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    options = ("momentum", "weight_decay", "dampening", "nesterov", "maximize", "differentiable")
    if any(group[name] for group in optimizer.param_groups for name in options):
        return False
    if not all(group["fused"] for group in optimizer.param_groups):
        return False  # another way was asked for
    weights = _weights(optimizer)
    return len(weights) <= TOGETHER and all(
        w.dtype == torch.float32
        and (w.grad is None or (w.grad.dtype == w.dtype and w.is_contiguous()))
        and (w.grad is None or w.grad.is_contiguous())
        for w in weights
    )


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


def _dense(tensor: Tensor) -> Tensor:
    """A tensor whose elements lie in memory without gaps, in any order."""
    filled = tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return tensor if filled else tensor.contiguous()


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"])
def _scan(
    bad, a0, a1, a2, a3, a4, a5, a6, a7, n0, n1, n2, n3, n4, n5, n6, n7, BLOCK: tl.constexpr
):  # fmt: skip
    """Set `bad` if an element of one of eight vectors is not finite."""
    which = tl.program_id(1)
    if which == 0:
        _scan_one(a0, n0, bad, BLOCK)
    elif which == 1:
        _scan_one(a1, n1, bad, BLOCK)
    elif which == 2:
        _scan_one(a2, n2, bad, BLOCK)
    elif which == 3:
        _scan_one(a3, n3, bad, BLOCK)
    elif which == 4:
        _scan_one(a4, n4, bad, BLOCK)
    elif which == 5:
        _scan_one(a5, n5, bad, BLOCK)
    elif which == 6:
        _scan_one(a6, n6, bad, BLOCK)
    else:
        _scan_one(a7, n7, bad, BLOCK)


@triton.jit
def _scan_one(a, n, bad, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(a + i, mask=i < n, other=0.0)
    if tl.max((values - values != 0).to(tl.int32), 0) > 0:
        tl.store(bad, 1.0)


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"])
def _step(
    found, rate, w0, w1, w2, w3, w4, w5, w6, w7, g0, g1, g2, g3, g4, g5, g6, g7,
    n0, n1, n2, n3, n4, n5, n6, n7, TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Subtract rate · g from eight vectors w, unless `found` is set."""
    which = tl.program_id(1)
    lr = tl.load(rate) if TENSOR else rate
    if tl.load(found) == 0.0:
        if which == 0:
            _step_one(w0, g0, n0, lr, BLOCK)
        elif which == 1:
            _step_one(w1, g1, n1, lr, BLOCK)
        elif which == 2:
            _step_one(w2, g2, n2, lr, BLOCK)
        elif which == 3:
            _step_one(w3, g3, n3, lr, BLOCK)
        elif which == 4:
            _step_one(w4, g4, n4, lr, BLOCK)
        elif which == 5:
            _step_one(w5, g5, n5, lr, BLOCK)
        elif which == 6:
            _step_one(w6, g6, n6, lr, BLOCK)
        else:
            _step_one(w7, g7, n7, lr, BLOCK)


@triton.jit
def _step_one(w, g, n, lr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    new = tl.load(w + i, mask=i < n, other=0.0) - lr * tl.load(g + i, mask=i < n, other=0.0)
    tl.store(w + i, new, mask=i < n)


@triton.jit
def _look(loss, bad, found, note):
    value = tl.load(loss).to(tl.float64)
    before = tl.load(found)
    if (tl.load(bad) != 0.0) | (value - value != 0.0) | (before != 0.0):
        if before == 0.0:
            tl.store(note + 1, value)
        tl.store(found, 1.0)
        tl.store(note, tl.load(note) + 1.0)
        tl.store(bad, 0.0)
