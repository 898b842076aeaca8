"""TorchJD's aggregators with gradmem's solver of the dual (extra: `gradmem[torchjd]`)."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmem.projection import solve_all
from gradmem.validation import non_negative

try:
    from torchjd.linalg import DualConeProjector, PSDMatrix
except ImportError as error:
    raise ImportError(
        "gradmem.integrations.torchjd needs TorchJD 0.18 or later: pip install gradmem[torchjd]"
    ) from error

__all__ = ["ExactProjector"]


class ExactProjector(DualConeProjector):
    """Projects onto the dual cone of a matrix's rows, for TorchJD's `UPGrad` and `DualProj`.

    A drop-in for TorchJD's own projector, with its settings: the weights are the same, but all rows
    of U are solved for together, in double precision on the device of the Gramian, and neither
    qpsolvers nor quadprog is needed. Gramians may be singular.

    Parameters
    ----------
    norm_eps
        A Gramian is divided by its trace; one with a smaller trace than this counts as zero.
    reg_eps
        Added to the diagonal then. With 0 for both the projection is that onto the cone itself, for
        gradients of any scale; near-singular Gramians of many rows take long then.

    Examples
    --------
    >>> import torch
    >>> from torchjd.aggregation import UPGrad
    >>> J = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]])
    >>> UPGrad(projector=ExactProjector())(J)
    tensor([0.2929, 1.9004, 1.9004])
    >>> UPGrad(projector=ExactProjector(norm_eps=0, reg_eps=0))(J)
    tensor([0.2924, 1.9006, 1.9006])
    """

    def __init__(self, *, norm_eps: float = 1e-4, reg_eps: float = 1e-4) -> None:
        self.norm_eps = non_negative("norm_eps", norm_eps)
        self.reg_eps = non_negative("reg_eps", reg_eps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(norm_eps={self.norm_eps}, reg_eps={self.reg_eps})"

    def __call__(self, U: Tensor, G: PSDMatrix) -> Tensor:
        """W: (..., m) for U: (..., m) and G = JJᵀ: (m, m): the projection of Jᵀu is Jᵀw."""
        with torch.no_grad():
            A = self._regularized(G.detach())
            lengths = A.diagonal().sqrt()
            lengths = torch.where(lengths > 0, lengths, 1.0)
            # With w = u + v the problem min wᵀGw, w ≥ u is the dual of equation 11 for b = Gu.
            u = U.detach().double()
            v = solve_all(A / lengths / lengths[:, None], u.reshape(-1, len(A)) @ A / lengths)
            return (u + (v / lengths).view_as(u)).to(G.dtype)

    def _regularized(self, G: Tensor) -> Tensor:
        """A: (m, m) in double precision; what comes before that is in G's, as in TorchJD."""
        trace = G.diagonal().sum()
        zero = (trace <= 0) | (trace < self.norm_eps)
        A = torch.where(zero, 0.0, G / torch.where(zero, 1.0, trace))
        A = (A + self.reg_eps * torch.eye(len(A)).to(A)).double()
        # A Gramian has rounding errors of its own, which must not look like a direction.
        own = 0.0 if G.dtype == torch.float64 else 8.0 * torch.finfo(G.dtype).eps
        if self.reg_eps < own:
            A.diagonal().mul_(1.0 + own)
        return A
