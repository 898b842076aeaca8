"""Steps on single examples in one kernel on a GPU, whose registers hold the weights meanwhile.

A step on one example is too little work for more than one of a GPU's multiprocessors, and to start
a kernel takes longer than a step. Runs side by side have one multiprocessor each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["changes_in_a_kernel"]


def changes_in_a_kernel(
    given: Tensor,
    inner: Tensor,
    upper: list[tuple[Tensor, Tensor | None, bool]],
    y: Tensor,
    masks: Tensor | None,
    rate: float | Tensor,
) -> Tensor:
    """Take the steps on the two upper layers; what each step adds to the first one's outputs.

    `given`: (n, units), what the first layer gives before its ReLU; `inner`: (n, n); `y`: (n,).
    """
    (W2, b2, _), (W3, b3, _) = upper
    changes = torch.empty_like(given)
    n, units = given.shape
    sizes = [triton.next_power_of_2(max(16, size)) for size in (n, units, len(W2), len(W3))]
    _steps[(1,)](
        given.contiguous(), inner, W2, b2, W3, b3, y.contiguous(),
        y if masks is None else masks.contiguous(), rate, changes, n, units, len(W2), len(W3),
        MASKED=masks is not None, TENSOR=isinstance(rate, Tensor),
        N=sizes[0], A=sizes[1], B=sizes[2], C=sizes[3], num_warps=8,
    )  # fmt: skip
    return changes


@triton.jit(do_not_specialize=["n"])
def _steps(
    given, inner, w2, b2, w3, b3, y, masks, rate, changes, n, a, b, c,
    MASKED: tl.constexpr, TENSOR: tl.constexpr,
    N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """All in registers: W2: (B, A), W3: (C, B), and the first layer's changes so far: (N, A)."""
    rows, i1, i2, i3 = tl.arange(0, N), tl.arange(0, A), tl.arange(0, B), tl.arange(0, C)
    at2 = i2[:, None] * a + i1[None, :]
    in2 = (i2[:, None] < b) & (i1[None, :] < a)
    at3 = i3[:, None] * b + i2[None, :]
    in3 = (i3[:, None] < c) & (i2[None, :] < b)
    W2, W3 = tl.load(w2 + at2, mask=in2, other=0.0), tl.load(w3 + at3, mask=in3, other=0.0)
    bias2 = tl.load(b2 + i2, mask=i2 < b, other=0.0)
    bias3 = tl.load(b3 + i3, mask=i3 < c, other=0.0)
    lr = tl.load(rate) if TENSOR else rate
    added = tl.zeros((N, A), tl.float32)
    for j in range(n):
        products = tl.load(inner + j * n + rows, mask=rows < j, other=0.0)
        z1 = tl.load(given + j * a + i1, mask=i1 < a, other=0.0)
        z1 += tl.sum(added * products[:, None], 0)
        h1 = tl.where(z1 <= 0, 0.0, z1)  # what is not a number stays one
        z2 = tl.sum(W2 * h1[None, :], 1) + bias2
        h2 = tl.where(z2 <= 0, 0.0, z2)
        z3 = tl.sum(W3 * h2[None, :], 1) + bias3
        there = i3 < c
        if MASKED:
            there = there & (tl.load(masks + j * c + i3, mask=i3 < c, other=0) != 0)
        z3 = tl.where(there, z3, float("-inf"))
        e = tl.exp(z3 - tl.max(z3, 0))
        d3 = -lr * (e / tl.sum(e, 0) - (i3 == tl.load(y + j)).to(tl.float32))
        d2 = tl.where(h2 <= 0, 0.0, tl.sum(W3 * d3[:, None], 0))
        W3 += d3[:, None] * h2[None, :]
        bias3 += d3
        d1 = tl.where(h1 <= 0, 0.0, tl.sum(W2 * d2[:, None], 0))
        W2 += d2[:, None] * h1[None, :]
        bias2 += d2
        added = tl.where(rows[:, None] == j, d1[None, :], added)
    tl.store(w2 + at2, W2, mask=in2)
    tl.store(w3 + at3, W3, mask=in3)
    tl.store(b2 + i2, bias2, mask=i2 < b)
    tl.store(b3 + i3, bias3, mask=i3 < c)
    place = rows[:, None] * a + i1[None, :]
    tl.store(changes + place, added, mask=(rows[:, None] < n) & (i1[None, :] < a))
