"""Steps on single examples on a CPU, compiled by Numba.

A step on one example is so little work that NumPy's calls take ten times as long as what they do.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

__all__ = ["changes_compiled"]


def changes_compiled(
    given: Tensor,
    inner: Tensor,
    relu: bool,
    upper: list[tuple[Tensor, Tensor | None, bool]],
    y: Tensor,
    masks: Tensor | None,
    rate: float,
) -> Tensor:
    """Take the steps on the upper layers; what each step adds to the first one's outputs.

    `given`: (n, units), what the first layer gives before its ReLU; `inner`: (n, n); `y`: (n,).
    """
    changes, none = torch.empty_like(given), given.new_empty(0)
    _steps(
        given.numpy(),
        inner.numpy(),
        tuple(W.numpy() for W, _, _ in upper),
        tuple((none if b is None else b).numpy() for _, b, _ in upper),
        (relu, *(own for _, _, own in upper)),
        y.contiguous().numpy(),
        (y.new_empty(0, 0, dtype=torch.bool) if masks is None else masks.contiguous()).numpy(),
        none.numpy().dtype.type(rate),
        changes.numpy(),
    )
    return changes


# These flags let sums be taken several numbers at a time, and keep what is not finite. Numba's own
# cache of what it compiled is off: it raises where no folder can be written.
@njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _steps(given, inner, weights, biases, relus, y, masks, rate, changes):
    """`weights`: (out, in) each; `biases`: (out,) or (0,); `relus`: after each layer or not.

    `masks`: (n, classes) or (0, 0). Every inner loop goes along a row.
    """
    n, units = given.shape
    last, zero = len(weights) - 1, given.dtype.type(0)
    classes = len(weights[last])
    widest = units
    for W in weights:
        widest = max(widest, len(W))
    gave = np.empty((len(relus), widest), given.dtype)  # by each layer, after its ReLU
    grad, below = np.empty(widest, given.dtype), np.empty(widest, given.dtype)
    for j in range(n):
        out = gave[0]
        for u in range(units):
            out[u] = given[j, u]
        for i in range(j):
            for u in range(units):
                out[u] += inner[j, i] * changes[i, u]
        if relus[0]:
            for u in range(units):
                out[u] = zero if out[u] <= zero else out[u]  # what is not a number stays one
        for k in range(len(weights)):
            W, b, h, out = weights[k], biases[k], gave[k], gave[k + 1]
            for r in range(len(W)):
                z = b[r] if len(b) else zero
                for u in range(W.shape[1]):
                    z += W[r, u] * h[u]
                out[r] = zero if relus[k + 1] and z <= zero else z

        out = gave[last + 1]
        if len(masks):
            for c in range(classes):
                out[c] = out[c] if masks[j, c] else -np.inf
        highest, total = out[0], zero
        for c in range(1, classes):
            highest = max(highest, out[c])
        for c in range(classes):
            grad[c] = np.exp(out[c] - highest)
            total += grad[c]
        for c in range(classes):
            grad[c] = -rate * (grad[c] / total - given.dtype.type(c == y[j]))

        for k in range(last, -1, -1):
            W, b, h, out = weights[k], biases[k], gave[k], gave[k + 1]
            for u in range(W.shape[1]):
                below[u] = zero
            for r in range(len(W)):
                g = grad[r]
                if relus[k + 1]:  # a product, so that what is not a number stays one
                    g *= given.dtype.type(out[r] > zero)
                for u in range(W.shape[1]):
                    below[u] += g * W[r, u]
                    W[r, u] += g * h[u]
                if len(b):
                    b[r] += g
            grad, below = below, grad
        for u in range(units):
            changes[j, u] = grad[u] * given.dtype.type(gave[0, u] > zero or not relus[0])
