"""Projecting a gradient so that no remembered task's loss rises (equations 9 to 12)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.validation import non_negative, one_of

__all__ = ["MARGIN_RULES", "project"]

MARGIN_RULES = ("shift", "floor")

Array = np.ndarray[Any, np.dtype[np.float64]]


def project(g: Tensor, G: Tensor, margin: float = 0.0, margin_rule: str = "shift") -> Tensor:
    """The vector closest to g whose inner product with no row of G is negative.

    If g already is that vector, g itself is returned, whatever the margin.

    Parameters
    ----------
    g
        (p,) the proposed update's gradient.
    G
        (k, p) one row per constraint: the gradients at the tasks' memories. k may be 0.
    margin
        γ ≥ 0: how far the update is pushed towards lowering the old losses, too.
    margin_rule
        "shift" adds γ to the solution v★ of the dual, as the paper's text says; "floor" solves the
        dual with v ≥ γ, as the code behind its numbers did.

    Returns
    -------
    Tensor
        g̃: (p,), in g's dtype and on its device.

    Examples
    --------
    >>> project(torch.tensor([1.0, -1.0]), torch.tensor([[0.0, 1.0]]))
    tensor([1., 0.])
    >>> project(torch.tensor([1.0, 1.0]), torch.tensor([[0.0, 1.0]]), margin=0.5)
    tensor([1., 1.])
    """
    _check(g, G)
    margin = non_negative("margin", margin)
    one_of("margin_rule", margin_rule, MARGIN_RULES)
    return project_counted(g, G, margin, margin_rule)[0]


def project_counted(
    g: Tensor, G: Tensor, margin: float, margin_rule: str
) -> tuple[Tensor, int, int]:
    """`project` without its checks; also how many constraints g violated, and how many bind."""
    if G.shape[0] == 0 or G.shape[1] == 0:
        return g, 0, 0
    # Double precision: products of float32 numbers are then exact, and repeated or opposite rows
    # stay so. Scaled rows: g̃ does not depend on the rows' lengths, but rounding does, and they may
    # differ by many orders of magnitude.
    rows, row_scale = _scaled(G.double())
    unit_g, g_scale = _scaled(g.double()[None])
    A, b = (rows @ rows.T).cpu().numpy(), (rows @ unit_g[0]).cpu().numpy()
    violated = int((b < 0).sum())
    if not violated:
        return g, 0, 0

    scale = row_scale[:, 0].cpu().numpy() / float(g_scale)  # from G's multipliers to those of rows
    floor = margin * scale if margin_rule == "floor" else np.zeros_like(b)
    free = dual(A, b + A @ floor)
    v = free + floor + (margin * scale if margin_rule == "shift" else 0.0)
    g_tilde = (unit_g[0] + torch.as_tensor(v, device=g.device) @ rows) * g_scale[0]
    return g_tilde.to(g.dtype), violated, int((free > 0).sum())


def dual(A: Array, b: Array) -> Array:
    """Minimise ½ vᵀAv + bᵀv over v ≥ 0 (equation 12): A = GGᵀ: (k, k), b = Gg: (k,), v★: (k,).

    The active-set method of Lawson and Hanson in its form for Gram matrices: constraints enter the
    working set one at a time, the most violated first, so that the rows in it stay independent
    even where A is singular. The bound on the number of steps only guards against rounding.
    """
    k = len(b)
    length = np.sqrt(np.diag(A))
    length[length == 0] = 1.0  # a row of zeros constrains nothing
    A, b = A / np.outer(length, length), b / length
    tolerance = 1e-13 * max(1.0, float(np.abs(b).max()))
    v = np.zeros(k)
    working = np.zeros(k, dtype=bool)
    barred = np.zeros(k, dtype=bool)  # would leave as it enters: dependent up to rounding
    for _ in range(10 * k):
        descent = -(A @ v + b)
        descent[working | barred] = -np.inf
        entering = int(descent.argmax())
        if descent[entering] <= tolerance:
            break
        working[entering] = True
        while True:
            s = np.zeros(k)
            s[working] = _solve(A[np.ix_(working, working)], -b[working])
            if (s[working] > 0).all():
                v, barred = s, np.zeros(k, dtype=bool)
                break
            if v[entering] == 0 and s[entering] <= 0:
                working[entering], barred[entering] = False, True
                break
            # Go towards s until the first multiplier reaches zero; its constraint leaves.
            ratio = np.full(k, np.inf)
            falling = working & (s <= 0)
            ratio[falling] = v[falling] / (v[falling] - s[falling])
            v = np.maximum(v + ratio.min() * (s - v), 0.0)
            working[ratio.argmin()] = False
            v[~working] = 0.0
    return v / length


def _solve(A: Array, b: Array) -> Array:
    try:
        return np.linalg.solve(A, b)  # type: ignore[return-value]
    except np.linalg.LinAlgError:
        return np.linalg.lstsq(A, b, rcond=None)[0]  # type: ignore[return-value]


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (k, p) with largest element 1, and what they were divided by: (k, 1)."""
    scale = rows.abs().amax(1, keepdim=True)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return rows / scale, scale


def _check(g: Tensor, G: Tensor) -> None:
    for name, values in (("g", g), ("G", G)):
        if not isinstance(values, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(values).__name__}")
        if not values.is_floating_point():
            raise TypeError(f"{name} must hold floating-point numbers, got {values.dtype}")
    if g.ndim != 1 or G.ndim != 2 or G.shape[1] != len(g):
        raise ValueError(f"g must be (p,) and G (k, p), got {tuple(g.shape)} and {tuple(G.shape)}")
    for name, values in (("g", g), ("G", G)):
        if not values.isfinite().all():
            raise ValueError(f"{name} must be finite, got {values}")
