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
    n = x.numel() // k
    out = torch.empty_like(x)
    coefficients = torch.stack([weight, shift, weight if on_z is None else on_z])
    block = 2048
    _affine[(triton.cdiv(n, block), k)](
        x, coefficients, z, out, n, channels, k, BOTH=z is not None, BLOCK=block, num_warps=8
    )
    return out


def _reduced(x: Tensor, z: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Σ x and Σ x (z − shift) of each task, shift: (k, channels); x moves, too, where it is z."""
    k, channels = shift.shape
    n = x.numel() // k
    # A block's rows are as many pixels as fill a power of two best; few of its lanes are idle.
    size = max(64, triton.next_power_of_2(channels))
    width = size // channels * channels
    block = max(1, 4096 // size)
    rows = triton.cdiv(n, width)
    programs = min(triton.cdiv(rows, block), max(1, 2048 // k))
    turns = triton.cdiv(rows, block * programs)
    parts = torch.empty((k, programs, 2, width), dtype=torch.float32, device=x.device)
    _sums[(programs, k)](
        x, z, shift.contiguous(), parts, n, channels, width, turns,
        SAME=x is z, SIZE=size, BLOCK=block, num_warps=4,
    )  # fmt: skip
    total = parts.sum(1, dtype=torch.float64).unflatten(2, (-1, channels)).sum(2)
    return total[:, 0], total[:, 1]


# What depends on the number of tasks is no constant: each would be compiled anew.
@triton.jit(do_not_specialize=["turns"])
def _sums(
    x, z, shift, parts, n, channels, width, turns,
    SAME: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, task = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, SIZE)
    start = task.to(tl.int64) * n
    middle = tl.load(shift + task * channels + c % channels, mask=c < width, other=0.0)
    alone = tl.zeros((BLOCK, SIZE), dtype=tl.float32)
    product = tl.zeros((BLOCK, SIZE), dtype=tl.float32)
    for turn in range(turns):
        r = (program * turns + turn) * BLOCK + tl.arange(0, BLOCK)
        place = r[:, None].to(tl.int64) * width + c[None, :]
        inside = (place < n) & (c < width)[None, :]
        one = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
        if SAME:
            one = tl.where(inside, one - middle[None, :], 0.0)
            product += one * one
        else:
            other = tl.load(z + start + place, mask=inside, other=0.0).to(tl.float32)
            product += one * (other - middle[None, :])
        alone += one
    out = parts + ((task * tl.num_programs(0) + program) * 2) * width + c
    tl.store(out, tl.sum(alone, 0), mask=c < width)
    tl.store(out + width, tl.sum(product, 0), mask=c < width)


@triton.jit(do_not_specialize=["k"])
def _affine(x, coefficients, z, out, n, channels, k, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    task = tl.program_id(1)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = task.to(tl.int64) * n + i
    own = coefficients + task * channels + i % channels
    value = tl.load(x + place, mask=i < n, other=0.0).to(tl.float32)
    value = value * tl.load(own) + tl.load(own + k * channels)
    if BOTH:
        other = tl.load(z + place, mask=i < n, other=0.0).to(tl.float32)
        value += other * tl.load(own + 2 * k * channels)
    tl.store(out + place, value, mask=i < n)
