"""A step's inner products, GGᵀ, Gg and |g|², and what follows from them alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradmem.projection.dual import Array, solve

__all__ = ["Counts", "Projected", "require_finite", "weights_on_host"]

#: Whether any constraint was violated (0 or 1), how many, how many bind, steps of the solver.
Counts = tuple[int, int, int, int]


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

    @classmethod
    def of(cls, cosines: Array, v: Array) -> Projected:
        return cls(torch.from_numpy(cosines), torch.from_numpy(v))


def require_finite(*products: Array | float) -> None:
    if not all(np.isfinite(part).all() for part in products):
        raise FloatingPointError(
            "the gradients at the memories are not finite: a smaller learning rate or margin may "
            "help"
        )


class InnerProducts:
    """The dual of a step in a form that does not depend on how long g and the rows of G are.

    Attributes
    ----------
    among, cosines
        Cosines of the angles between the rows: (k, k), and between them and g: (k,). Those of a
        row of zeros are zero.
    lengths, size
        Lengths of the rows: (k,), and |g|.
    """

    def __init__(self, GGt: Array, Gg: Array, gg: float) -> None:
        """GGt: (k, k), Gg: (k,) and gg = |g|² in double precision."""
        require_finite(GGt, Gg, gg)
        self.lengths: Array = np.sqrt(GGt.diagonal())
        self.size = float(np.sqrt(gg))
        divisors = np.where(self.lengths > 0, self.lengths, 1.0)
        self.among: Array = GGt / divisors / divisors[:, None]
        self.cosines: Array = Gg / divisors / (self.size or 1.0)

    @property
    def violated(self) -> int:
        """How many constraints g violates."""
        return int((self.cosines < 0).sum())

    def begin(self, margin: float, margin_rule: str) -> tuple[Array, float]:
        """The dual's b: (k,), of elements of at most 1 in size, and the length it is relative to.

        Under "floor" v = γ + w with w ≥ 0: the same problem, for g + γ Gᵀ1, which may be far longer
        than g.
        """
        if margin_rule == "shift":
            return self.cosines, self.size
        size = self.size + margin * float(self.lengths.sum())
        push = self.among @ (margin * self.lengths / (size or 1.0))
        return self.cosines * (self.size / (size or 1.0)) + push, size

    def weights(self, solution: Array, size: float) -> Array:
        """v: (k,) for G as it is, from the solution of the dual and what it is relative to."""
        return np.divide(solution * size, self.lengths, where=self.lengths > 0, out=0 * solution)


def weights_on_host(
    GGt: Array, Gg: Array, gg: float, margin: float, margin_rule: str
) -> tuple[Array, Counts, Projected]:
    """The weights of g̃ = g + Gᵀw: (k,), what there was to do, and what was found."""
    inner = InnerProducts(GGt, Gg, gg)
    if not inner.violated:
        nothing = np.zeros_like(Gg)
        return nothing, (0, 0, 0, 0), Projected.of(inner.cosines, nothing)
    b, size = inner.begin(margin, margin_rule)
    solution, steps = solve(inner.among, b)
    v = inner.weights(solution, size)
    counts = (1, inner.violated, int((solution > 0).sum()), steps)
    return v + margin, counts, Projected.of(inner.cosines, v)
