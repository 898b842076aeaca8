"""Parts of the gradients that are many small steps on a GPU, as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["affine", "softmax_slopes", "statistics", "sums"]


def softmax_slopes(logits: Tensor, y: Tensor, shares: Tensor, out: Tensor) -> None:
    """Write (softmax(logits) − onehot(y)) · shares into out: (n, classes); y and shares: (n,)."""
    n, classes = logits.shape
    size = triton.next_power_of_2(classes)
    rows = max(1, 1024 // size)
    _softmax_slopes[(triton.cdiv(n, rows),)](
        logits, y, shares, out, n, classes, logits.stride(0), ROWS=rows, SIZE=size
    )


@triton.jit
def _softmax_slopes(
    logits, y, shares, slopes, n, classes, stride, ROWS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, SIZE)
    inside = (r[:, None] < n) & (c[None, :] < classes)
    z = tl.load(logits + r[:, None] * stride + c[None, :], mask=inside, other=float("-inf"))
    label = tl.load(y + r, mask=r < n, other=0)
    share = tl.load(shares + r, mask=r < n, other=0.0)
    e = tl.exp(z - tl.max(z, 1)[:, None])
    p = e / tl.sum(e, 1)[:, None]
    p = (p - (c[None, :] == label[:, None]).to(p.dtype)) * share[:, None]
    tl.store(slopes + r[:, None] * classes + c[None, :], p, mask=inside)


def statistics(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each of k tasks in x: (k·m, …, channels) in memory: (k, channels)."""
    n = x.numel() // (k * x.shape[1])
    # Sums of squares keep their last digits if the numbers are close to zero.
    shift = x.movedim(1, -1).reshape(k, n, -1)[:, 0].float()
    alone, squares = _reduced(x, x, shift)
    moved = alone / n
    return (shift + moved).float(), (squares / n - moved * moved).clamp_min(0).float()


def sums(x: Tensor, grad: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Σ (x − mean)·grad and Σ grad of each task: (k, channels) as mean is."""
    alone, products = _reduced(grad, x, mean)
    return products.float(), alone.float()


def affine(
    x: Tensor, weight: Tensor, shift: Tensor, z: Tensor | None, on_z: Tensor | None
) -> Tensor:
    """An affine map, weight · x + shift (+ on_z · z), the coefficients (k, channels)."""
    k, channels = weight.shape
    rows = x.numel() // (k * channels)
    size, block = _tile(channels)
    out = torch.empty_like(x)
    _affine[(triton.cdiv(rows, block), k)](
        x, weight.contiguous(), shift.contiguous(), z, on_z if on_z is None else on_z.contiguous(),
        out, rows, channels, BOTH=z is not None, SIZE=size, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _reduced(x: Tensor, z: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Σ x and Σ x (z − shift) of each task, shift: (k, channels); x moves, too, where it is z."""
    k, channels = shift.shape
    rows = x.numel() // (k * channels)
    size, block = _tile(channels)
    programs = min(triton.cdiv(rows, block), max(1, 2048 // k))
    turns = triton.cdiv(rows, block * programs)
    parts = torch.empty((k, programs, 2, channels), dtype=torch.float32, device=x.device)
    _sums[(programs, k)](
        x, z, shift.contiguous(), parts, rows, channels,
        SAME=x is z, SIZE=size, BLOCK=block, TURNS=turns, num_warps=4,
    )  # fmt: skip
    total = parts.sum(1, dtype=torch.float64)
    return total[:, 0], total[:, 1]


def _tile(channels: int) -> tuple[int, int]:
    """Channels, and rows at a time, that a program takes."""
    size = triton.next_power_of_2(channels)
    return size, max(1, 4096 // size)


@triton.jit
def _sums(
    x, z, shift, parts, rows, channels,
    SAME: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    program, task = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, SIZE)
    start = task.to(tl.int64) * rows * channels
    middle = tl.load(shift + task * channels + c, mask=c < channels, other=0.0)
    alone = tl.zeros((BLOCK, SIZE), dtype=tl.float32)
    product = tl.zeros((BLOCK, SIZE), dtype=tl.float32)
    for turn in range(TURNS):
        r = (program * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        place = start + r[:, None] * channels + c[None, :]
        inside = (r < rows)[:, None] & (c < channels)[None, :]
        one = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if SAME:
            one = tl.where(inside, one - middle[None, :], 0.0)
            product += one * one
        else:
            other = tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
            product += one * (other - middle[None, :])
        alone += one
    place = parts + ((task * tl.num_programs(0) + program) * 2) * channels + c
    tl.store(place, tl.sum(alone, 0), mask=c < channels)
    tl.store(place + channels, tl.sum(product, 0), mask=c < channels)


@triton.jit
def _affine(
    x, weight, shift, z, on_z, out, rows, channels,
    BOTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1)
    c = tl.arange(0, SIZE)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = task.to(tl.int64) * rows * channels + r[:, None] * channels + c[None, :]
    inside = (r < rows)[:, None] & (c < channels)[None, :]
    a = tl.load(weight + task * channels + c, mask=c < channels, other=0.0)
    b = tl.load(shift + task * channels + c, mask=c < channels, other=0.0)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
    if BOTH:
        e = tl.load(on_z + task * channels + c, mask=c < channels, other=0.0)
        value += tl.load(z + place, mask=inside, other=0.0).to(tl.float32) * e[None, :]
    tl.store(out + place, value, mask=inside)
