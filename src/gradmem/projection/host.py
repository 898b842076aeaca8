"""The projection on the host: an active-set method, in double precision where it matters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradmem.projection.dual import Array, IllConditionedError, dual, least_distance
from gradmem.projection.inner import Counts, Projected

__all__ = ["project_on_host"]

Indices = np.ndarray[Any, np.dtype[np.int64]]


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
        return g, (0, 0, 0, 0), Projected.of(cosines, np.zeros_like(signs))
    push = margin / length * G.sum(0)
    if margin_rule == "floor":  # v = γ + w with w ≥ 0: the same problem from another start
        begin, size = _scaled(start + push)  # the margin's share may be far longer than g
        nearest, v, steps = _nearest(begin, constraints)
        nearest, v = nearest * size, v * float(size)
    else:
        nearest, v, steps = _nearest(start, constraints)
        nearest = nearest + push
    counts = (1, violated, int((v > 0).sum()), steps)
    found = Projected.of(cosines, v * float(length) / constraints.scale)
    return (nearest * length).to(g.dtype), counts, found


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


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values with largest element 1 in each row, and what they were divided by."""
    scale = values.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return values / scale, scale
