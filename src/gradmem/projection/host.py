"""The projection on the host: an active-set method, in double precision where it matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Projected", "dual", "project_on_host", "solve"]

Array = np.ndarray[Any, np.dtype[np.float64]]
#: Whether any constraint was violated (0 or 1), how many, how many bind, steps of the solver.
Counts = tuple[int, int, int, int]
Indices = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Projected:
    """What a projection found, one value per constraint: (k,) tensors in double precision.

    Attributes
    ----------
    cosines
        Of the angle between g and each gradient; a negative one is a violated constraint.
    v
        The solution v★ of the dual, without the margin; zero where nothing was violated.
    """

    cosines: Tensor
    v: Tensor


def project_on_host(
    g: Tensor, G: Tensor, margin: float, margin_rule: str
) -> tuple[Tensor, Counts, Projected]:
    """g̃: (p,) for g: (p,) and G: (k, p), what there was to do, and what was found."""
    # g̃ does not depend on how long the rows are, and follows g's length; rounding depends on both.
    start, length = _scaled(g.double())
    constraints = _Constraints(G)
    if not constraints.in_range():
        rows, scale = _scaled(G.double())
        constraints = _Constraints(rows, scale[:, 0].cpu().numpy())
    signs = constraints.signs(start)
    if np.isnan(signs).any():
        raise FloatingPointError(
            "the gradients at the memories are not finite: a smaller learning rate or margin may "
            "help"
        )
    violated = int((signs < 0).sum())
    lengths = float(start.norm()) * constraints.lengths
    cosines = np.divide(signs, lengths, out=np.zeros_like(signs), where=lengths > 0)
    if not violated:
        return g, (0, 0, 0, 0), _found(cosines, np.zeros_like(signs))
    push = margin / length * G.sum(0)
    if margin_rule == "floor":  # v = γ + w with w ≥ 0: the same problem from another start
        begin, size = _scaled(start + push)  # the margin's share may be far longer than g
        nearest, v, steps = _nearest(begin, constraints)
        nearest, v = nearest * size, v * float(size)
    else:
        nearest, v, steps = _nearest(start, constraints)
        nearest = nearest + push
    counts = (1, violated, int((v > 0).sum()), steps)
    found = _found(cosines, v * float(length) / constraints.scale)
    return (nearest * length).to(g.dtype), counts, found


def _found(cosines: Array, v: Array) -> Projected:
    return Projected(torch.from_numpy(cosines), torch.from_numpy(v))


def solve(A: Array, b: Array) -> Array:
    """v★ ≥ 0: (k,) that minimises ½ vᵀAv + bᵀv for A = GGᵀ: (k, k) and b = Gg: (k,)."""
    try:
        return dual(A, b)[0]
    except IllConditionedError:
        # A = RᵀR, so with Rᵀd = b the problem is min |Rv + d|.
        values, vectors = np.linalg.eigh(A)
        root = np.sqrt(np.maximum(values, 0.0))
        kept = root > 1e-8 * root.max()
        R = root[kept, None] * vectors[:, kept].T
        d = (vectors[:, kept].T @ b) / root[kept]
        lengths = np.linalg.norm(R, axis=0)
        lengths[lengths == 0] = 1.0
        v: Array = least_distance(R / lengths, d)[0] / lengths
        return v


def _nearest(start: Tensor, constraints: _Constraints) -> tuple[Tensor, Array, int]:
    """The vector closest to `start`: (p,) that violates no constraint; its v: (k,); steps taken.

    Most constraints never matter, so the dual is solved for those that are violated, and again
    with those that the solution violates, until it violates none.
    """
    inside = np.zeros(len(constraints.G), dtype=bool)
    tolerance = max(1e-12, 8 * torch.finfo(constraints.G.dtype).eps) * float(start.norm())
    nearest, steps = start, 0
    whole = np.zeros(len(constraints.G))
    factored = False
    while True:
        products, slack = constraints.products(nearest), tolerance * constraints.lengths
        outside = ~inside & (products < -slack)
        failed = not factored and bool((products < -8 * slack)[inside].any())
        if not outside.any() and not failed:
            return nearest, whole, steps
        inside |= outside
        known = inside.nonzero()[0]
        factored |= failed
        if not factored:
            try:
                v, taken = dual(*constraints.dual_problem(known, start))
                nearest = start + constraints.combine(known, v)
            except IllConditionedError:
                factored = True
        if factored:
            nearest, v, taken = constraints.nearest_by_factors(known, start)
        steps += taken
        whole[known] = v


class _Constraints:
    """Inner products with the rows of G: (k, p).

    Rows stay in their own precision; what decides, signs and the dual's coefficients, is summed in
    double precision, in which products of float32 numbers are exact.
    """

    #: Numbers that are in double precision at a time: they stay in the processor's cache.
    BLOCK = 1 << 17

    def __init__(self, G: Tensor, scale: Array | float = 1.0) -> None:
        self.scale = scale  # what the rows were divided by
        self.G = G.float() if G.dtype in (torch.float16, torch.bfloat16) else G
        self.lengths: Array = self.G.norm(dim=1).double().cpu().numpy()

    def in_range(self) -> bool:
        """Whether squares of the rows' elements surely keep clear of the type's limits."""
        return bool(((self.lengths > 1e-15) & (self.lengths < 1e15)).all())

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

    def nearest_by_factors(self, rows: Indices, start: Tensor) -> tuple[Tensor, Array, int]:
        """The vector closest to `start` that violates none of some rows, their v, steps taken.

        With Gᵀ = QR the dual is min |Qᵀg + Rv| over v ≥ 0. Squares are never formed, so rows may be
        as close to dependent as their precision allows; it costs far more than GGᵀ.
        """
        index = torch.as_tensor(rows, device=self.G.device)
        lengths = torch.as_tensor(self.lengths[rows], device=self.G.device)
        unit = self.G.index_select(0, index).double() / lengths[:, None]
        Q, R = torch.linalg.qr(unit.T)
        along = Q.T @ start
        v, steps = least_distance(R.cpu().numpy(), along.cpu().numpy())
        # What binds has no part in the result; to say so is more exact than to add it up, since
        # the v of nearly dependent rows are large and cancel.
        binding = torch.from_numpy(v > 0).to(self.G.device)
        Q, _ = torch.linalg.qr(unit[binding].T)
        nearest = start - Q @ (Q.T @ start)
        nearest = nearest - Q @ (Q.T @ nearest)
        return nearest, v / self.lengths[rows], steps

    def combine(self, rows: Indices, v: Array) -> Tensor:
        """Σ v_k g_k over some rows: (p,), in the rows' precision."""
        active = rows[v > 0]
        return torch.from_numpy(v[v > 0]).to(self.G) @ self.G[active]


class IllConditionedError(ArithmeticError):
    """Rows are so close to dependent that their inner products do not tell what to do."""


def dual(A: Array, b: Array) -> tuple[Array, int]:
    """Minimise ½ vᵀAv + bᵀv over v ≥ 0 (equation 12); v★: (k,) and the steps it took.

    A = GGᵀ: (k, k) and b = Gg: (k,).

    The active-set method of Lawson and Hanson in its form for Gram matrices: constraints enter the
    working set one at a time, the most violated first. A row that depends on those in the set up
    to rounding waits, so that the rows in it stay independent even where A is singular; the
    solution settles such a row, too, or does not, which the caller can see. The bound on the number
    of steps only guards against rounding.
    """
    k = len(b)
    length = np.sqrt(np.diag(A))
    length[length == 0] = 1.0  # a row of zeros constrains nothing
    A, b = A / np.outer(length, length), b / length
    tolerance = 1e-13 * max(1.0, float(np.abs(b).max()))
    v = np.zeros(k)
    working = np.zeros(k, dtype=bool)
    barred = np.zeros(k, dtype=bool)  # depends on the working set, or would leave as it enters
    steps = 0
    while steps < 10 * k:
        descent = -(A @ v + b)
        descent[working | barred] = -np.inf
        entering = int(descent.argmax())
        if descent[entering] <= tolerance:
            break
        if _depends(A, working, entering):
            barred[entering] = True
            continue
        working[entering] = True
        while True:
            steps += 1
            s = np.zeros(k)
            s[working] = np.linalg.solve(A[np.ix_(working, working)], -b[working])
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
    return v / length, steps


def _depends(A: Array, working: Bools, entering: int) -> bool:
    """Whether a row depends on the working set up to rounding; A has a unit diagonal.

    What decides is the square of the row's distance to the span of the others.
    """
    across = A[working, entering]
    if not len(across):
        return False
    combination = np.linalg.solve(A[np.ix_(working, working)], across)
    square = 1.0 - float(across @ combination)
    rounding = 1e-15 * (1.0 + float(np.abs(combination).sum())) ** 2
    if rounding < square < 1e7 * rounding:
        raise IllConditionedError
    return square <= rounding


def least_distance(R: Array, d: Array) -> tuple[Array, int]:
    """Minimise |Rv + d| over v ≥ 0; v★: (k,) and the steps it took.

    R: (m, k) has columns of length 1 or 0. Lawson and Hanson's method as in `dual`, with a QR
    factorisation of the working set in place of inner products: what is left of d is orthogonal to
    the set up to the last digits, however close to dependent its columns are. It has no part along
    a column that depends on them, which therefore never enters.
    """
    k = R.shape[1]
    tolerance = 1e-13 * float(np.linalg.norm(d))
    v, left = np.zeros(k), d
    working: list[int] = []
    barred: set[int] = set()  # would leave as they enter
    steps = 0
    while steps < 10 * k:
        slope = R.T @ left
        slope[[*working, *barred]] = np.inf
        entering = int(slope.argmin())
        if slope[entering] >= -tolerance:
            break
        before = list(working)
        working.append(entering)
        while True:
            steps += 1
            Q, T = np.linalg.qr(R[:, working])
            along = Q.T @ d
            s = np.linalg.solve(T, -along)
            if (s > 0).all():
                break
            # Go towards s until the first multiplier reaches zero; its column leaves.
            now, falling = v[working], s <= 0
            ratio = np.full(len(s), np.inf)
            ratio[falling] = now[falling] / np.maximum(now - s, 1e-300)[falling]
            v[working] = np.maximum(now + ratio.min() * (s - now), 0.0)
            v[working.pop(int(ratio.argmin()))] = 0.0
        if working == before:
            barred.add(entering)
            continue
        v[working], barred = s, set()
        left = d - Q @ along
        left = left - Q @ (Q.T @ left)
    return v, steps


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values with largest element 1 in each row, and what they were divided by."""
    scale = values.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return values / scale, scale
