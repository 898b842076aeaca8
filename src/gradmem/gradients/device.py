"""Parts of the gradients that are many small steps on a GPU, as one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["softmax_slopes"]


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
