"""Many duals with the same A at once, on any device: block principal pivoting."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from gradmem.projection.dual import solve
from gradmem.projection.threads import one_thread

__all__ = ["solve_all"]

#: Exchanges of all wrong indices without progress, before one at a time (Júdice and Pires).
PATIENCE = 3
#: Corrections of a guess, beyond which it is taken to go round in circles.
MOST_CORRECTIONS = 60
#: How negative an element may be, relative to what it is summed up from.
TOLERANCE = 1e-13


def solve_all(A: Tensor, B: Tensor) -> Tensor:
    """The v ≥ 0 that minimise ½ vᵀAv + bᵀv for each row b of B: (n, m); (n, m), on A's device.

    A: (m, m) is positive semidefinite with ones or zeros on its diagonal; both are in double
    precision. A guess of which elements are positive is corrected for all problems at once, by a
    Cholesky factorisation each, until none is wrong: a few times, whatever m is, if A is not nearly
    singular. Where that takes too long the problem is solved by itself, on the CPU.
    """
    with one_thread() if A.device.type == "cpu" else nullcontext():
        return _solve_all(A, B)


def _solve_all(A: Tensor, B: Tensor) -> Tensor:
    size = B.abs().amax(1, keepdim=True)
    B = B / torch.where(size > 0, size, 1.0)
    V = torch.zeros_like(B)
    left = (B < 0).any(1).nonzero()[:, 0]
    if len(left):
        # As much as rounding takes away, so that a singular A has factors, too.
        ridge = 4.0 * len(A) * torch.finfo(A.dtype).eps
        V[left], settled = _pivot(A + ridge * torch.eye(len(A)).to(A), B[left])
        for i in left[~settled].tolist():
            v, _ = solve(A.cpu().numpy(), B[i].cpu().numpy())
            V[i] = torch.from_numpy(v).to(A.device)
    return V * size


def _pivot(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """What `solve_all` gives: (n, m), and for which problems: (n,)."""
    V, positive = torch.zeros_like(B), B < 0
    left = torch.arange(len(B), device=B.device)
    fewest = torch.full_like(left, len(A) + 1)
    patience = torch.full_like(left, PATIENCE)
    for _ in range(MOST_CORRECTIONS):
        v, slope = _with_support(A, B[left], positive[left])
        rounding = TOLERANCE * (1.0 + v.abs().sum(1, keepdim=True))
        wrong = torch.where(positive[left], v < 0, slope < -rounding)
        count = wrong.sum(1)
        settled = count == 0
        V[left[settled]] = v[settled]
        # All wrong ones change sides as long as their number falls, and a few times more; after
        # that, the last one alone, which cannot go on for ever.
        patience[left] = torch.where(count < fewest[left], PATIENCE, patience[left] - 1)
        fewest[left] = torch.minimum(fewest[left], count)
        last = wrong & (wrong.flip(1).cumsum(1).flip(1) == 1)
        positive[left] ^= torch.where((patience[left] >= 0)[:, None], wrong, last)
        left = left[~settled]
        if not len(left):
            break
    done = torch.ones(len(B), dtype=torch.bool, device=B.device)
    done[left] = False
    return V, done


def _with_support(A: Tensor, B: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """The v: (n, m) that has no slope where it may be positive and is zero elsewhere; its slope."""
    both = positive[:, :, None] & positive[:, None, :]
    factor, _ = torch.linalg.cholesky_ex(torch.where(both, A, torch.eye(len(A)).to(A)))
    v = _solved(factor, torch.where(positive, -B, 0.0))
    slope = v @ A + B
    v = v - _solved(factor, torch.where(positive, slope, 0.0))  # one step of refinement
    return v, v @ A + B


def _solved(factor: Tensor, b: Tensor) -> Tensor:
    return torch.cholesky_solve(b[:, :, None], factor)[:, :, 0]
