"""Projecting a gradient so that no remembered task's loss rises (equations 9 to 12)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gradmem.cuda.devices import current_device, has_triton, is_recording
from gradmem.projection.host import project_on_host
from gradmem.projection.inner import Counts, Projected, weights_on_host
from gradmem.validation import non_negative, non_negative_int, one_of

__all__ = ["BOUNDS", "MARGIN_RULES", "Projection", "Unstored", "project", "solve_dual"]

MARGIN_RULES = ("shift", "floor")
#: How far `project` may be off on a CPU, by the coarser dtype of g and G; see `project`.
BOUNDS = {torch.float32: 2e-5, torch.float64: 2e-11}
COUNTS = ("violations", "violated_constraints", "active_constraints", "solver_steps")


class Unstored(Protocol):
    """What a projection needs of a G: (k, p) that is not stored, or not in one process."""

    def __len__(self) -> int: ...

    def products(self, z: Tensor, /) -> tuple[Tensor, Tensor]:
        """GGᵀ: (k, k) and Gz: (k,) in double precision, for z: (p,)."""
        ...

    def look(self, z: Tensor, /) -> tuple[Tensor, Tensor] | None:
        """Gz: (k,) and GGᵀ's diagonal: (k,), if they cost less and are likely to be enough."""
        ...

    def square(self, z: Tensor, /) -> Tensor:
        """|z|²: () in double precision."""
        ...

    def combine(self, v: Tensor, /) -> Tensor:
        """The last z plus Gᵀv: (p,) for v: (k,)."""
        ...


def project(g: Tensor, G: Tensor, margin: float = 0.0, margin_rule: str = "shift") -> Tensor:
    """The vector closest to g whose inner product with no row of G is negative, for margin 0.

    If g already is that vector, g itself is returned, whatever the margin. Otherwise a margin moves
    the result on, along the rows of G: towards lowering the old losses more, but no longer closest,
    and under "shift" not always within the constraints.

    Rows may be parallel, opposite, repeated, zero or nearly dependent; they and g of any scale from
    1e-30 to 1e30 (a float32 below 1e-37 does not have all of its digits). How exact the result is
    on a CPU, with ε = 2e-5 in single and 2e-11 in double precision (`BOUNDS`, for the coarser of g
    and G), z = g̃ without what the margin added under "shift", v ≥ 0 the weights that the dual gave,
    and size = |g| + γ Σ|g_k|: ⟨z, g_k⟩ ≥ −ε size |g_k| for all k; v_k |⟨z, g_k⟩| ≤ ε size max v_i
    |g_i|; and g + Gᵀ(v + γ) is g̃ up to ε (size + Σ v_k |g_k|).

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
    projection = Projection(margin, margin_rule)
    if G.is_cuda:  # where the projection does not wait to find out
        _check_finite(g=g, G=G)
    try:
        with torch.no_grad():
            return projection(g, G)
    except FloatingPointError:  # seen by the products of G, which cost a pass over it already
        _check_finite(g=g, G=G)
        raise


def solve_dual(GGt: Tensor, Gg: Tensor, margin: float = 0.0, margin_rule: str = "shift") -> Tensor:
    """The weights v of `project`, g̃ = g + Gᵀv, from inner products alone (equation 11).

    For gradients that are nobody's rows of G: sharded over machines, say, or never stored. It is
    solved on the CPU in double precision.

    Parameters
    ----------
    GGt
        (k, k) inner products of the constraints' gradients.
    Gg
        (k,) their inner products with g.
    margin, margin_rule
        See `project`.

    Returns
    -------
    Tensor
        v: (k,), in Gg's dtype and on its device; zero if no entry of Gg is negative.

    Examples
    --------
    >>> solve_dual(torch.tensor([[4.0]]), torch.tensor([-2.0]))
    tensor([0.5000])
    """
    _check(Gg, GGt, names=("Gg", "GGt"))
    _check_finite(Gg=Gg, GGt=GGt)
    if len(GGt) != len(Gg):
        raise ValueError(f"GGt must be (k, k) and Gg (k,), got {len(GGt)} rows and {len(Gg)}")
    margin = non_negative("margin", margin)
    one_of("margin_rule", margin_rule, MARGIN_RULES)
    A, b = (part.detach().double().cpu().numpy() for part in (GGt, Gg))
    squares = A.diagonal()
    least = np.divide(b * b, squares, where=squares > 0, out=np.zeros_like(b))
    v, *_ = weights_on_host(A, b, float(least.max(initial=0.0)), margin, margin_rule)
    return torch.from_numpy(v).to(Gg)


class Projection:
    """`project` without its checks, for many steps: it counts what there was to do.

    On a GPU nothing waits for it: the dual is solved there, and the counts stay there until they
    are asked for.

    Attributes
    ----------
    last
        What the last projection found; None if it was recorded as a CUDA graph.
    """

    def __init__(self, margin: float = 0.0, margin_rule: str = "shift") -> None:
        self.margin = non_negative("margin", margin)
        self.margin_rule = one_of("margin_rule", margin_rule, MARGIN_RULES)
        self._host = [0] * len(COUNTS)
        self._device: Tensor | None = None
        self.last: Projected | None = None

    def __call__(self, g: Tensor, G: Tensor | Unstored, scale: Tensor | None = None) -> Tensor:
        """g̃: (p,) for g: (p,) and G: (k, p); the margin is multiplied by `scale`: ().

        A G that is not stored is waited for.
        """
        self.last = None
        if not isinstance(G, Tensor):
            return self._from_products(g, G, scale)
        if G.shape[0] == 0 or G.shape[1] == 0:
            return g
        if g.is_cuda and has_triton():
            return self._on_device(g, G, scale)
        margin = self.margin if scale is None else self.margin * float(scale)
        g_tilde, counts, self.last = project_on_host(g, G, margin, self.margin_rule)
        self._count(counts)
        return g_tilde

    def _from_products(self, g: Tensor, G: Unstored, scale: Tensor | None) -> Tensor:
        if (looked := G.look(g)) is not None and self._holds(*looked, G.square(g)):
            return g
        GGt, Gg = G.products(g)
        weights = self.weights(GGt, Gg, G.square(g), scale)
        if weights.isnan().any():
            raise FloatingPointError("the gradients at the memories are not finite")
        return G.combine(weights) if weights.any() else g

    def _holds(self, Gg: Tensor, squares: Tensor, gg: Tensor) -> bool:
        """Whether no constraint is violated: then `last` says so."""
        if not bool((Gg >= 0).all() & squares.isfinite().all()):  # bad numbers go the long way
            return False
        self.last = Projected((Gg / (squares * gg).sqrt()).nan_to_num(), torch.zeros_like(Gg))
        return True

    def weights(self, GGt: Tensor, Gg: Tensor, gg: Tensor, scale: Tensor | None = None) -> Tensor:
        """The weights w: (k,) of g̃ = g + Gᵀw, from inner products alone.

        For gradients that are never stored. It counts, and sets `last`, like a call. On a GPU with
        Triton the dual is solved there, and nothing waits; elsewhere on the CPU.

        Parameters
        ----------
        GGt, Gg, gg
            (k, k), (k,) and (), in double precision: inner products of the constraints' gradients,
            theirs with g, and |g|².
        scale
            (), what the margin is multiplied by.

        Returns
        -------
        Tensor
            v★ + γ in double precision, on GGt's device; zero if no constraint is violated, also
            with a margin. If the products are not finite, a FloatingPointError; on a GPU, NaN.
        """
        self.last = None
        if not len(Gg):
            return torch.zeros_like(Gg)
        if GGt.is_cuda and has_triton():
            return self._weights_on_device(GGt, Gg, gg, scale)
        margin = self.margin if scale is None else self.margin * float(scale)
        A, b = (part.cpu().numpy() for part in (GGt, Gg))
        weights, counts, self.last = weights_on_host(A, b, float(gg), margin, self.margin_rule)
        self._count(counts)
        return torch.from_numpy(weights).to(GGt.device)

    def _count(self, counts: Counts) -> None:
        self._host = [total + count for total, count in zip(self._host, counts, strict=True)]

    def _weights_on_device(
        self, GGt: Tensor, Gg: Tensor, gg: Tensor, scale: Tensor | None
    ) -> Tensor:
        from gradmem.projection.device import weights_on_device

        with current_device(GGt.device), torch.autocast("cuda", enabled=False):
            counts, gamma = self._on(GGt.device, scale)
            problem = torch.cat([GGt, Gg[:, None]], 1)
            weights, v = weights_on_device(problem, gamma, self.margin_rule == "floor", counts)
            if not is_recording():  # a graph would have it computed in every step
                self.last = Projected((Gg / (GGt.diagonal() * gg).sqrt()).nan_to_num(), v)
            return weights

    def _on(self, device: torch.device, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Counts that stay on a GPU: (4,), and the margin there: ()."""
        if self._device is None:  # before a graph may refer to them
            self._device = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
            self._gamma = torch.tensor(self.margin, dtype=torch.float64, device=device)
        return self._device, self._gamma if scale is None else self._gamma * scale.double()

    def _on_device(self, g: Tensor, G: Tensor, scale: Tensor | None) -> Tensor:
        from gradmem.projection.device import project_on_device

        floor = self.margin_rule == "floor"
        with current_device(g.device), torch.autocast("cuda", enabled=False):
            counts, gamma = self._on(g.device, scale)
            g_tilde, v = project_on_device(g, G, gamma, floor, counts)
            if not is_recording():  # a graph would have it computed in every step
                lengths = torch.linalg.vector_norm(G, dim=1) * torch.linalg.vector_norm(g)
                self.last = Projected((G @ g / lengths).nan_to_num().double(), v)
            return g_tilde

    def counts(self) -> dict[str, int]:
        """Steps with a violation, violated and binding constraints, steps of the solver; so far."""
        device = [0] * len(COUNTS) if self._device is None else self._device.tolist()
        return {
            name: here + there for name, here, there in zip(COUNTS, self._host, device, strict=True)
        }

    def set_counts(self, counts: dict[str, int]) -> None:
        if not isinstance(counts, dict):
            raise TypeError(f"counts must be a dict, got {type(counts).__name__}")
        self._host = [non_negative_int(name, counts[name]) for name in COUNTS]
        if self._device is not None:
            self._device.zero_()


def _check(g: Tensor, G: Tensor, names: tuple[str, str] = ("g", "G")) -> None:
    for name, values in zip(names, (g, G), strict=True):
        if not isinstance(values, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(values).__name__}")
        if not values.is_floating_point():
            raise TypeError(f"{name} must hold floating-point numbers, got {values.dtype}")
    if g.ndim != 1 or G.ndim != 2 or G.shape[1] != len(g):
        raise ValueError(
            f"{names[0]} must be (p,) and {names[1]} (k, p), got {tuple(g.shape)} and "
            f"{tuple(G.shape)}"
        )


def _check_finite(**named: Tensor) -> None:
    for name, values in named.items():
        if not values.isfinite().all():
            bad = (~values.isfinite()).nonzero()[0]
            raise ValueError(
                f"{name} must be finite, got {values[tuple(bad)].item()} at {bad.tolist()}"
            )
