"""Parts of the gradients that are many small steps on a GPU, as one kernel."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["move", "normalise", "normalise_back", "softmax_gradient"]


def softmax_gradient(logits: Tensor, y: Tensor, shares: Tensor, out: Tensor) -> None:
    """Write (softmax(logits) − onehot(y)) · shares into out: (n, classes); y and shares: (n,)."""
    n, classes = logits.shape
    size = triton.next_power_of_2(classes)
    rows = max(1, 1024 // size)
    _softmax_gradient[(triton.cdiv(n, rows),)](
        logits, y, shares, out, n, classes, logits.stride(0), ROWS=rows, SIZE=size
    )


@triton.jit
def _softmax_gradient(
    logits, y, shares, slopes, n, classes, stride, ROWS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, SIZE)
    inside = (r[:, None] < n) & (c[None, :] < classes)
    z = tl.load(logits + r[:, None] * stride + c[None, :], mask=inside, other=float("-inf"))
    label = tl.load(y + r, mask=r < n, other=0)
    share = tl.load(shares + r, mask=r < n, other=0.0)
    e = tl.exp(z - tl.max(z, 1)[:, None])
    p = e / tl.sum(e, 1)[:, None]
    p = (p - (c[None, :] == label[:, None]).to(p.dtype)) * share[:, None]
    tl.store(slopes + r[:, None] * classes + c[None, :], p, mask=inside)


def normalise(
    x: Tensor, k: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Each of k tasks in x: (k·m, channels, …), channels last in memory, by its own statistics.

    Returns
    -------
    y, statistics
        y is like x; statistics: (3, k, channels) are mean, 1 / standard deviation, and variance.
    """
    channels, n = x.shape[1], x.numel() // k
    parts, programs = _sums_of_parts(x, x, None, k)
    found = torch.empty((3, k, channels), dtype=torch.float32, device=x.device)
    coefficients = torch.empty((3, k, channels), dtype=torch.float32, device=x.device)
    _statistics[(k,)](
        x, parts, weight, bias, found, coefficients, n, n // channels, k, programs, eps,
        **_widths(channels),
    )  # fmt: skip
    return _mapped(x, coefficients, None), found


def move(
    statistics: Tensor, means: Tensor, variances: Tensor, tracked: Tensor | None, by: float, n: int
) -> None:
    """Move the running statistics as `statistics` of `normalise` do, task after task."""
    _, k, channels = statistics.shape
    block = 32
    _move[(triton.cdiv(channels, block),)](
        statistics, means, variances, tracked, k, channels, by,
        math.log2(1 - by) if by < 1 else -1e6, (1 - by) ** k, n / max(1, n - 1),
        TASKS=32, BLOCK=block, num_warps=1,
    )  # fmt: skip


def normalise_back(
    x: Tensor, grad: Tensor, statistics: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The way back through `normalise`.

    Returns
    -------
    dx, slopes
        dx is like x; slopes: (2, k, channels) are the gradients of weight and bias.
    """
    _, k, channels = statistics.shape
    parts, programs = _sums_of_parts(grad, x, statistics, k)
    slopes = torch.empty((2, k, channels), dtype=torch.float32, device=x.device)
    coefficients = torch.empty((3, k, channels), dtype=torch.float32, device=x.device)
    _slopes[(k,)](
        parts, weight, statistics, slopes, coefficients, x.numel() // (k * channels), k, programs,
        **_widths(channels),
    )  # fmt: skip
    return _mapped(grad, coefficients, x), slopes


def _mapped(x: Tensor, coefficients: Tensor, z: Tensor | None) -> Tensor:
    """Of x and z the affine map that the coefficients (3, k, channels) say, per task."""
    _, k, channels = coefficients.shape
    n = x.numel() // k
    out = torch.empty_like(x)
    block = 2048
    _map[(triton.cdiv(n, block), k)](
        x, coefficients, z, out, n, k, CHANNELS=channels, BOTH=z is not None, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    return out


def _sums_of_parts(x: Tensor, z: Tensor, statistics: Tensor | None, k: int) -> tuple[Tensor, int]:
    """Σ x and Σ x (z − mean) over parts of each task: (k, programs, 2, pixels · channels).

    Without statistics it is Σ x′ and Σ x′² for x′ = x − the task's first pixel: sums of squares
    keep their last digits if the numbers are close to zero.
    """
    channels, n = x.shape[1], x.numel() // k
    widths = _widths(channels)
    block = max(1, 4096 // widths["SIZE"])
    rows = triton.cdiv(n, widths["WIDTH"])
    programs = min(triton.cdiv(rows, block), max(32, 528 // k))
    turns = triton.cdiv(rows, block * programs)
    shape = (k, programs, 2, widths["WIDTH"])
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    _sums[(programs, k)](
        x, z, statistics, parts, n, turns,
        SAME=statistics is None, BLOCK=block, num_warps=4, **widths,
    )  # fmt: skip
    return parts, programs


def _widths(channels: int) -> dict[str, int]:
    """A block's rows are as many pixels as fill a power of two best; few of its lanes are idle."""
    size = max(64, int(triton.next_power_of_2(channels)))
    return {"CHANNELS": channels, "WIDTH": size // channels * channels, "SIZE": size}


# What depends on the number of tasks is no constant: kernels would be compiled for each.
@triton.jit(do_not_specialize=["turns"])
def _sums(
    x, z, means, parts, n, turns,
    SAME: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program, task = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, SIZE)
    start = task.to(tl.int64) * n
    if SAME:
        middle = tl.load(x + start + c % CHANNELS).to(tl.float32)
    else:
        middle = tl.load(means + task * CHANNELS + c % CHANNELS)
    alone = tl.zeros((BLOCK, SIZE), dtype=tl.float32)
    product = tl.zeros((BLOCK, SIZE), dtype=tl.float32)
    for turn in range(turns):
        r = (program * turns + turn) * BLOCK + tl.arange(0, BLOCK)
        place = r[:, None] * WIDTH + c[None, :]
        inside = (place < n) & (c < WIDTH)[None, :]
        one = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
        if SAME:
            one = tl.where(inside, one - middle[None, :], 0.0)
            product += one * one
        else:
            other = tl.load(z + start + place, mask=inside, other=0.0).to(tl.float32)
            product += one * (other - middle[None, :])
        alone += one
    out = parts + ((task * tl.num_programs(0) + program) * 2) * WIDTH + c
    tl.store(out, tl.sum(alone, 0), mask=c < WIDTH)
    tl.store(out + WIDTH, tl.sum(product, 0), mask=c < WIDTH)


@triton.jit
def _totals(
    parts, task, programs, c, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Both sums over a task's parts and the pixels in each, per channel, in double precision."""
    ROWS: tl.constexpr = 4096 // SIZE
    PIXELS: tl.constexpr = WIDTH // CHANNELS
    alone = tl.zeros((ROWS, SIZE), dtype=tl.float64)
    product = tl.zeros((ROWS, SIZE), dtype=tl.float64)
    for first in range(0, programs * PIXELS, ROWS):
        r = first + tl.arange(0, ROWS)
        start = (task * programs + r // PIXELS) * 2 * WIDTH + r % PIXELS * CHANNELS
        place = parts + start[:, None] + c[None, :]
        inside = (r < programs * PIXELS)[:, None] & (c < CHANNELS)[None, :]
        alone += tl.load(place, mask=inside, other=0.0)
        product += tl.load(place + WIDTH, mask=inside, other=0.0)
    return tl.sum(alone, 0), tl.sum(product, 0)


@triton.jit(do_not_specialize=["k", "programs"])
def _statistics(
    x, parts, weight, bias, found, coefficients, n, pixels, k, programs, eps,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(0)
    c = tl.arange(0, SIZE)
    inside = c < CHANNELS
    shift = tl.load(x + task.to(tl.int64) * n + c, mask=inside, other=0.0).to(tl.float64)
    alone, squares = _totals(parts, task, programs, c, CHANNELS, WIDTH, SIZE)
    moved = alone / pixels
    mean, var = shift + moved, tl.maximum(squares / pixels - moved * moved, 0.0)
    scale = 1 / tl.sqrt(var + eps)
    w, b = scale, tl.zeros(c.shape, dtype=tl.float64)
    if weight is not None:
        w = scale * tl.load(weight + c, mask=inside, other=0.0)
    if bias is not None:
        b += tl.load(bias + c, mask=inside, other=0.0)
    place, size = task * CHANNELS + c, k * CHANNELS
    tl.store(found + place, mean.to(tl.float32), mask=inside)
    tl.store(found + size + place, scale.to(tl.float32), mask=inside)
    tl.store(found + 2 * size + place, var.to(tl.float32), mask=inside)
    tl.store(coefficients + place, w.to(tl.float32), mask=inside)
    tl.store(coefficients + size + place, (b - mean * w).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["k", "programs"])
def _slopes(
    parts, weight, found, slopes, coefficients, pixels, k, programs,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(0)
    c = tl.arange(0, SIZE)
    inside = c < CHANNELS
    place, size = task * CHANNELS + c, k * CHANNELS
    mean = tl.load(found + place, mask=inside, other=0.0).to(tl.float64)
    scale = tl.load(found + size + place, mask=inside, other=0.0).to(tl.float64)
    by_bias, product = _totals(parts, task, programs, c, CHANNELS, WIDTH, SIZE)
    by_weight = product * scale
    # dx = s·w (dy − mean(dy) − x̂ mean(dy x̂)) is one more affine map, of dy and of x
    on_grad = scale
    if weight is not None:
        on_grad = scale * tl.load(weight + c, mask=inside, other=0.0)
    on_x = -on_grad * scale * by_weight / pixels
    shift = -on_grad * by_bias / pixels - on_x * mean
    tl.store(slopes + place, by_weight.to(tl.float32), mask=inside)
    tl.store(slopes + size + place, by_bias.to(tl.float32), mask=inside)
    tl.store(coefficients + place, on_grad.to(tl.float32), mask=inside)
    tl.store(coefficients + size + place, shift.to(tl.float32), mask=inside)
    tl.store(coefficients + 2 * size + place, on_x.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["k"])
def _map(
    x, coefficients, z, out, n, k,
    CHANNELS: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1)
    start = task.to(tl.int64) * n
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = coefficients + task * CHANNELS + i % CHANNELS
    value = tl.load(x + start + i, mask=i < n, other=0.0).to(tl.float32)
    value = value * tl.load(own) + tl.load(own + k * CHANNELS)
    if BOTH:
        other = tl.load(z + start + i, mask=i < n, other=0.0).to(tl.float32)
        value += other * tl.load(own + 2 * k * CHANNELS)
    tl.store(out + start + i, value, mask=i < n)


@triton.jit(do_not_specialize=["k"])
def _move(
    found, means, variances, tracked, k, channels, by, log_left, kept, unbiased,
    TASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do k moves by (1 − μ) old + μ new in a row: what is left of each after all of them."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mean = kept * tl.load(means + c, mask=c < channels, other=0.0)
    var = kept * tl.load(variances + c, mask=c < channels, other=0.0)
    for first in range(0, k, TASKS):
        t = first + tl.arange(0, TASKS)
        inside = (t < k)[:, None] & (c < channels)[None, :]
        place = t[:, None] * channels + c[None, :]
        share = tl.where(t < k, by * tl.exp2((k - 1 - t) * log_left), 0.0)[:, None]
        mean += tl.sum(share * tl.load(found + place, mask=inside, other=0.0), 0)
        variance = tl.load(found + 2 * k * channels + place, mask=inside, other=0.0)
        var += tl.sum(share * unbiased * variance, 0)
    tl.store(means + c, mean, mask=c < channels)
    tl.store(variances + c, var, mask=c < channels)
    if tracked is not None:
        tl.store(tracked, tl.load(tracked) + k, mask=tl.program_id(0) == 0)
