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
Indices = np.ndarray[Any, np.dtype[np.int64]]


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
    # g̃ does not depend on how long the rows are, and follows g's length; rounding depends on both.
    rows, _ = _scaled(G)
    start, length = _scaled(g)
    constraints = _Constraints(rows)
    violated = int((constraints.signs(start) < 0).sum())
    if not violated:
        return g, 0, 0
    push = margin / length * G.sum(0)
    if margin_rule == "floor":  # v = γ + w with w ≥ 0: the same problem from another start
        nearest, active = _nearest(start + push, constraints)
    else:
        nearest, active = _nearest(start, constraints)
        nearest = nearest + push
    return (nearest * length).to(g.dtype), violated, active


def _nearest(start: Tensor, constraints: _Constraints) -> tuple[Tensor, int]:
    """The vector closest to `start`: (p,) that violates no constraint, and how many bind.

    Most constraints never matter, so the dual is solved for those that are violated, and again
    with those that the solution violates, until it violates none.
    """
    inside = np.zeros(len(constraints.G), dtype=bool)
    tolerance = max(1e-12, 8 * torch.finfo(constraints.G.dtype).eps) * float(start.norm())
    nearest, active = start, 0
    while True:
        outside = ~inside & (constraints.products(nearest) < -tolerance * constraints.lengths)
        if not outside.any():
            return nearest, active
        inside |= outside
        known = inside.nonzero()[0]
        v = dual(*constraints.dual_problem(known, start))
        nearest, active = start + constraints.combine(known, v), int((v > 0).sum())


class _Constraints:
    """Inner products with the rows of G: (k, p).

    Rows stay in their own precision; what decides, signs and the dual's coefficients, is summed in
    double precision, in which products of float32 numbers are exact.
    """

    #: Numbers that are in double precision at a time: they stay in the processor's cache.
    BLOCK = 1 << 17

    def __init__(self, G: Tensor) -> None:
        self.G = G.float() if G.dtype in (torch.float16, torch.bfloat16) else G
        self.lengths: Array = self.G.norm(dim=1).double().cpu().numpy()

    def products(self, z: Tensor) -> Array:
        """⟨z, g_k⟩ for all rows: (k,), in the rows' precision."""
        return (self.G @ z.to(self.G.dtype)).double().cpu().numpy()

    def signs(self, z: Tensor) -> Array:
        """⟨z, g_k⟩ for all rows: (k,), with the right signs."""
        products = self.products(z)
        unclear = np.abs(products) <= 1e-4 * float(z.norm()) * self.lengths + 1e-30
        if unclear.any() and self.G.dtype != torch.float64:
            products[unclear] = self.dual_problem(unclear.nonzero()[0], z)[1]
        return products

    def dual_problem(self, rows: Indices, z: Tensor) -> tuple[Array, Array]:
        """⟨g_i, g_j⟩: (n, n) and ⟨g_i, z⟩: (n,) for n of the rows, in double precision."""
        n = len(rows)
        index = torch.as_tensor(rows, device=self.G.device)
        gram = torch.zeros((n, n + 1), dtype=torch.float64, device=self.G.device)
        width = max(1, self.BLOCK // n)
        for start in range(0, len(z), width):
            columns = slice(start, start + width)
            block = self.G[:, columns].index_select(0, index).double()
            gram[:, :n].addmm_(block, block.T)
            gram[:, n].addmv_(block, z[columns].double())
        both: Array = gram.cpu().numpy()
        return both[:, :n], both[:, n]

    def combine(self, rows: Indices, v: Array) -> Tensor:
        """Σ v_k g_k over some rows: (p,), in the rows' precision."""
        active = rows[v > 0]
        return torch.from_numpy(v[v > 0]).to(self.G) @ self.G[active]


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


def _scaled(values: Tensor) -> tuple[Tensor, Tensor | float]:
    """Double-precision values with largest element 1 in each row, and what they were divided by.

    Squares of float64 numbers may leave the type's range; those of narrower types, as doubles,
    cannot.
    """
    if values.dtype != torch.float64:
        return (values, 1.0) if values.ndim > 1 else (values.double(), 1.0)
    scale = values.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return values / scale, scale


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
