"""Projecting a gradient so that no remembered task's loss rises (equations 9 to 12)."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmem.cuda.devices import current_device, has_triton
from gradmem.projection.host import project_on_host
from gradmem.validation import non_negative, one_of

__all__ = ["MARGIN_RULES", "Projection", "project"]

MARGIN_RULES = ("shift", "floor")
COUNTS = ("violations", "violated_constraints", "active_constraints", "solver_steps")


def project(g: Tensor, G: Tensor, margin: float = 0.0, margin_rule: str = "shift") -> Tensor:
    """The vector closest to g whose inner product with no row of G is negative, for margin 0.

    If g already is that vector, g itself is returned, whatever the margin. Otherwise a margin moves
    the result on, along the rows of G: towards lowering the old losses more, but no longer closest,
    and under "shift" not always within the constraints.

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
    with torch.no_grad():
        return projection(g, G)


class Projection:
    """`project` without its checks, for many steps: it counts what there was to do.

    On a GPU nothing waits for it: the dual is solved there, and the counts stay there until they
    are asked for.
    """

    def __init__(self, margin: float = 0.0, margin_rule: str = "shift") -> None:
        self.margin = non_negative("margin", margin)
        self.margin_rule = one_of("margin_rule", margin_rule, MARGIN_RULES)
        self._host = [0] * len(COUNTS)
        self._device: Tensor | None = None

    def __call__(self, g: Tensor, G: Tensor) -> Tensor:
        """g̃: (p,) for g: (p,) and G: (k, p)."""
        if G.shape[0] == 0 or G.shape[1] == 0:
            return g
        if g.is_cuda and has_triton():
            return self._on_device(g, G)
        g_tilde, counts = project_on_host(g, G, self.margin, self.margin_rule)
        self._host = [total + count for total, count in zip(self._host, counts, strict=True)]
        return g_tilde

    def _on_device(self, g: Tensor, G: Tensor) -> Tensor:
        from gradmem.projection.device import project_on_device

        if self._device is None:  # before a graph may refer to them
            self._device = torch.zeros(len(COUNTS), dtype=torch.int64, device=g.device)
            self._gamma = torch.tensor(self.margin, dtype=torch.float64, device=g.device)
        floor = self.margin_rule == "floor"
        with current_device(g.device), torch.autocast("cuda", enabled=False):
            return project_on_device(g, G, self._gamma, floor, self._device)

    def counts(self) -> dict[str, int]:
        """Steps with a violation, violated and binding constraints, steps of the solver; so far."""
        device = [0] * len(COUNTS) if self._device is None else self._device.tolist()
        return {
            name: here + there for name, here, there in zip(COUNTS, self._host, device, strict=True)
        }

    def set_counts(self, counts: dict[str, int]) -> None:
        self._host = [counts[name] for name in COUNTS]
        if self._device is not None:
            self._device.zero_()


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
            bad = (~values.isfinite()).nonzero()[0]
            raise ValueError(
                f"{name} must be finite, got {values[tuple(bad)].item()} at {bad.tolist()}"
            )
