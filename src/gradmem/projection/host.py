"""The projection on the host: what costs time is GGᵀ in double precision, and passes over G.

Gg tells whether a constraint is violated. If most are, GGᵀ of all rows tells the rest, and one more
pass gives g̃. If few are, GGᵀ of these is enough most of the time, which a pass with the result
shows. Copies of G are made only where rows are nearly dependent, or too long or too short for
double precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradmem.projection.blocks import add_rows, inner_products
from gradmem.projection.dual import Array, IllConditionedError, dual, least_distance
from gradmem.projection.inner import Counts, Projected, require_finite

__all__ = ["project_on_host"]

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

#: What may be left of a violated constraint, relative to the step and the constraint's gradient.
TOLERANCE, TOLERANCE_IN_DOUBLE = 1e-7, 1e-12
#: Inner products in single precision are right up to this, relative to the vectors' lengths.
UNCLEAR, UNCLEAR_IN_DOUBLE = 1e-4, 1e-12
#: Inner products in double precision are.
ROUNDING = 1e-15
#: Largest Σ v_k |g_k| / |g| for which a result summed up in single precision is exact enough.
MOST_IN_SINGLE = 8.0
#: The share of the rows from which on all are as good.
MOST_ROWS = 0.8


def project_on_host(
    g: Tensor, G: Tensor, margin: float, margin_rule: str
) -> tuple[Tensor, Counts, Projected]:
    """g̃: (p,) for g: (p,) and G: (k, p), what there was to do, and what was found."""
    seen = _look(g, G, every=margin_rule == "floor")  # v ≥ γ concerns all constraints
    if seen is not None and not seen.suspects.any():
        return g, (0, 0, 0, 0), Projected.of(seen.cosines, np.zeros(len(G)))
    margins, unit, units = np.full(len(G), margin), 1.0, np.ones(len(G))
    step = _Step(g, G, margins, margin_rule, seen)
    if not step.in_range():  # g̃ does not depend on how long the rows are, and follows g's length
        unit, units = float(_largest(g[None])[0]), _largest(G)
        require_finite(unit, units)
        g_in_units, rows = g.double() / unit, G.double() / torch.from_numpy(units).to(G)[:, None]
        step = _Step(g_in_units, rows, margin * (units / unit), margin_rule, None)
    violated = int((step.cosines < 0).sum())
    if not violated:
        return g, (0, 0, 0, 0), Projected.of(step.cosines, np.zeros(len(G)))
    g_tilde, solution, steps = step.take()
    counts = (1, violated, int((solution > 0).sum()), steps)
    found = Projected.of(step.cosines, step.weights(solution) * unit / units)
    return (g_tilde if unit == 1.0 else g_tilde * unit).to(g.dtype), counts, found


class _Seen(NamedTuple):
    """Cosines of the angles between g and the rows, the rows' lengths, and which may be violated.

    (k,) each, in the rows' precision.
    """

    cosines: Array
    lengths: Array
    suspects: Bools


def _look(g: Tensor, G: Tensor, every: bool) -> _Seen | None:
    """What Gg and the rows' lengths tell; None if inner products of all rows are needed.

    They are if so many constraints may be violated, or if the type of g and G does not tell. If
    `every`, also if one may be violated.
    """
    if not _same_precision(g, G):
        return None
    along = (G @ g).double().cpu().numpy()
    suspects = along <= 1e-30  # or too small for the type
    if not np.isfinite(along).all() or _most(suspects) or (every and suspects.any()):
        return None
    lengths = torch.linalg.vector_norm(G, dim=1).double().cpu().numpy()
    size = float(torch.linalg.vector_norm(g))
    if not all(1e-15 < length < 1e15 for length in (*lengths, size)):
        return None
    cosines = along / lengths / size
    suspects = cosines <= _unclear(G)
    if _most(suspects) or (every and suspects.any()):
        return None
    return _Seen(cosines, lengths, suspects)


def _most(rows: Bools) -> bool:
    return int(rows.sum()) >= MOST_ROWS * len(rows)


def _same_precision(g: Tensor, G: Tensor) -> bool:
    """Whether products of g and G can be left to torch."""
    return g.dtype == G.dtype and G.dtype in (torch.float32, torch.float64)


def _unclear(G: Tensor) -> float:
    return UNCLEAR_IN_DOUBLE if G.dtype == torch.float64 else UNCLEAR


def _largest(rows: Tensor) -> Array:
    """The largest element in size of each row: (k,), 1 for a row of zeros."""
    largest: Array = torch.linalg.vector_norm(rows, torch.inf, dim=1).double().cpu().numpy()
    return np.where(largest == 0, 1.0, largest)


class _Step:
    """A projection that has to be made, or nearly so.

    Inside, g and the rows of G have length 1, and with them the dual's A and b; its solution is in
    units of `size` by a row's length.

    Attributes
    ----------
    cosines
        Of the angles between g and the rows: (k,).
    """

    def __init__(
        self, g: Tensor, G: Tensor, margins: Array, margin_rule: str, seen: _Seen | None
    ) -> None:
        self.g, self.G, self.margins = g, G, margins
        double = g.dtype == G.dtype == torch.float64
        self.tolerance = TOLERANCE_IN_DOUBLE if double else TOLERANCE
        self.floor = margin_rule == "floor"
        self.cosines, self.lengths = np.zeros(len(G)), np.ones(len(G))
        if seen is not None:
            self.cosines, self.lengths = seen.cosines, seen.lengths
        self._consider(np.ones(len(G), dtype=bool) if seen is None else seen.suspects)

    def _consider(self, inside: Bools) -> None:
        """Compute the dual's A and b for some rows, and what else their inner products tell."""
        self.inside = np.ones_like(inside) if _most(inside) else inside
        rows = None if self.inside.all() else self._tensor(self.inside.nonzero()[0])
        products: Array = inner_products(self.G, self.g, rows).cpu().numpy()
        self.squares = products.diagonal()
        if not np.isfinite(products).all():
            return  # beyond the range
        lengths = np.sqrt(self.squares)
        divisors = np.where(lengths == 0, 1.0, lengths)
        self.A = products[:-1, :-1] / divisors[:-1] / divisors[:-1, None]
        self.b = products[:-1, -1] / divisors[:-1] / divisors[-1]
        self.size = float(divisors[-1])
        self.lengths[self.inside], self.cosines[self.inside] = divisors[:-1], self.b
        if self.floor:  # v = γ + w with w ≥ 0: the same problem from g + Gᵀγ, far longer maybe
            pushes = self.margins * lengths[:-1]
            self.size = float(divisors[-1] + pushes.sum())
            self.b = self.b * (divisors[-1] / self.size) + self.A @ (pushes / self.size)

    def in_range(self) -> bool:
        """Whether inner products keep clear of the limits of double precision."""
        beyond = ~((self.squares > 1e-250) & (self.squares < 1e250))
        rows = self.inside.nonzero()[0][beyond[:-1]].tolist()
        vectors = [self.G[i] for i in rows] + ([self.g] if beyond[-1] else [])
        return not any(bool(vector.any()) for vector in vectors)

    def take(self) -> tuple[Tensor, Array, int]:
        """g̃: (p,), the dual's solution: (k,), and the steps it took.

        Most constraints never matter, so the dual is solved for those that are violated, and again
        with those that the solution violates or may violate, until there are none.
        """
        steps = 0
        while True:
            try:
                v, taken = dual(self.A, self.b)
            except IllConditionedError:
                return self._by_factors()
            steps += taken
            unsettled = (self.A @ v + self.b < -8 * self.tolerance).any()
            if unsettled or ROUNDING * float(v.sum()) > self.tolerance:
                return self._by_factors()
            solution = np.zeros(len(self.inside))
            solution[self.inside] = v
            if self.inside.all():
                return self._moved(solution, self.margins), solution, steps
            z = self._moved(solution, np.zeros_like(solution))
            along = (self.G @ z).double().cpu().numpy()
            outside = ~self.inside & (along <= _unclear(self.G) * self.lengths * self.size)
            if not outside.any():
                return self._pushed(z), solution, steps
            self._consider(self.inside | outside)

    def weights(self, solution: Array) -> Array:
        """v★: (k,) for g and G as they are."""
        return solution * self.size / self.lengths

    def _moved(self, solution: Array, margins: Array) -> Tensor:
        """g̃ = g + Gᵀ(v + γ): (p,), in one pass over those rows that have a weight."""
        weights = self.weights(solution) + margins
        if not self._in_own_precision(solution, weights):
            return add_rows(self.g, self.G, self._tensor(weights), self.g.dtype)
        moving = weights.nonzero()[0].tolist()
        if 3 * len(moving) > len(weights):
            return torch.addmv(self.g, self.G.T, self._tensor(weights).to(self.G.dtype))
        g_tilde = self.g.clone()
        for i in moving:
            g_tilde.add_(self.G[i], alpha=float(weights[i]))
        return g_tilde

    def _pushed(self, z: Tensor) -> Tensor:
        """Add Gᵀγ to z: (p,), in its place."""
        if not self.margins.any():
            return z
        return z.addmv_(self.G.T, self._tensor(self.margins).to(self.G.dtype))

    def _in_own_precision(self, solution: Array, weights: Array) -> bool:
        """Whether the result may be summed up in the rows' precision.

        In single precision not if large weights cancel, or are beyond its limits.
        """
        if not _same_precision(self.g, self.G) or self.G.dtype == torch.float64:
            return _same_precision(self.g, self.G)
        moving = weights[weights > 0]
        in_range = self.size < 1e30 and bool(((moving > 1e-30) & (moving < 1e30)).all())
        return in_range and float(solution.sum()) <= MOST_IN_SINGLE

    def _tensor(self, values: Array | Indices) -> Tensor:
        return torch.from_numpy(values).to(self.G.device)

    def _by_factors(self) -> tuple[Tensor, Array, int]:
        """What `take` gives, for rows whose inner products do not tell enough.

        With Gᵀ = QR the dual is min |Qᵀg + Rv| over v ≥ 0. Squares are never formed, so rows may be
        as close to dependent as their precision allows; it costs far more than GGᵀ.
        """
        push = add_rows(0 * self.g, self.G, self._tensor(self.margins), torch.float64) / self.size
        start = self.g.double() / self.size
        nearest = start = start + push if self.floor else start
        solution, steps = np.zeros(len(self.inside)), 0
        outside, inside = self.inside.copy(), np.zeros_like(self.inside)
        outside[self.inside] = self.b < 0
        while outside.any():
            inside |= outside
            rows = inside.nonzero()[0]
            unit = self.G[self._tensor(rows)].double() / self._tensor(self.lengths[rows])[:, None]
            nearest, solution[rows], taken = _nearest(unit, start)
            steps += taken
            along = inner_products(self.G, nearest)[:-1, -1].cpu().numpy()
            outside = ~inside & (along < -self.tolerance * self.lengths)
        g_tilde = nearest if self.floor else nearest + push
        return (g_tilde * self.size).to(self.g.dtype), solution, steps


def _nearest(unit: Tensor, start: Tensor) -> tuple[Tensor, Array, int]:
    """The vector closest to `start`: (p,) that violates none of some rows of length 1; v; steps."""
    Q, R = torch.linalg.qr(unit.T)
    along = Q.T @ start
    v, steps = least_distance(R.cpu().numpy(), along.cpu().numpy())
    # What binds has no part in the result; to say so is more exact than to add it up, since
    # the v of nearly dependent rows are large and cancel.
    binding = torch.from_numpy(v > 0).to(unit.device)
    Q, _ = torch.linalg.qr(unit[binding].T)
    nearest = start - Q @ (Q.T @ start)
    return nearest - Q @ (Q.T @ nearest), v, steps
