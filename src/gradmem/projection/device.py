"""The projection on a GPU, without waiting for it, so that a step can be a CUDA graph.

GGᵀ in double precision is what takes long where there are many tasks, and few of them matter. From
`CHOOSE_FROM` tasks on, the dual is first solved for the `CHOSEN` constraints that g goes against
the most. Where its solution violates no other constraint either, it is that of the whole problem;
elsewhere the whole problem is solved.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from gradmem.projection import kernels

__all__ = [
    "products_on_device",
    "products_with_on_device",
    "project_on_device",
    "weights_on_device",
]

#: Tasks from which on a few are tried first, and how many: what fills a block of 32 with g.
CHOOSE_FROM, CHOSEN = 48, 31
#: Most tasks that the kernels can take at once.
MOST = 127
#: How far a solution may be off, relative to |g| and a constraint's length.
TOLERANCE = 1e-9
#: Rows in a kernel's block → columns in it, programs, warps: measured on an H200.
GRAM = {16: (16, 528, 2), 32: (16, 264, 4), 64: (32, 264, 4), 128: (16, 132, 8)}
PRODUCTS = (16, 64, 66, 4)  # with the rows of a program
#: Programs of `products` for very many columns.
MANY = 2112
APPLY = {16: (64, 264, 4), 32: (64, 264, 4), 64: (64, 264, 4), 128: (32, 264, 4)}


def project_on_device(
    g: Tensor, G: Tensor, margin: Tensor, floor: bool, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """g̃: (p,) for g: (p,) and G: (k, p), and the dual's solution v★: (k,).

    `margin` is γ: () as a double, which a kernel cannot be given as a number. Adds to `counts`:
    (4,) whether there was a violation, how many constraints were violated, how many bind, and how
    many steps it took to find out.
    """
    if g.itemsize < 4 or G.itemsize < 4:  # the compiler has no products of these
        g_tilde, v = project_on_device(g.float(), G.float(), margin, floor, counts)
        return g_tilde.to(g.dtype), v
    g, G = g.contiguous(), G if G.stride(1) == 1 else G.contiguous()
    step = _Step(g, G, margin, floor, counts)
    if step.k > MOST:
        step.solve(step.large_problem())
        return step.large_result(), step.weights[1]
    if step.k < CHOOSE_FROM or floor:  # v ≥ γ concerns all constraints from the start
        step.solve(step.problem())
        return step.apply(), step.weights[1]
    step.choose()
    step.solve(step.problem(step.chosen), step.chosen)
    g_tilde = step.apply(step.z)
    step.judge()
    step.solve(step.problem(flagged=True), flagged=True)
    return step.apply(out=g_tilde), step.weights[1]


def products_on_device(G: Tensor, g: Tensor) -> Tensor:
    """[GGᵀ, Gg]: (k, k + 1) in double precision, for G: (k, p) and g: (p,)."""
    if g.itemsize < 4 or G.itemsize < 4:
        g, G = g.float(), G.float()
    nothing = torch.empty(0, device=g.device)  # margin and counts, of which there are none
    step = _Step(g.contiguous(), G.contiguous(), nothing, False, nothing)
    return step.problem() if step.k <= MOST else step.large_problem()


def products_with_on_device(G: Tensor, g: Tensor) -> Tensor:
    """[Gg, |g|²]: (k + 1,) in double precision, for G: (k, p) and g: (p,); one pass over both."""
    if g.itemsize < 4 or G.itemsize < 4:
        g, G = g.float(), G.float()
    nothing = torch.empty(0, device=g.device)  # margin and counts, of which there are none
    step = _Step(g.contiguous(), G if G.stride(1) == 1 else G.contiguous(), nothing, False, nothing)
    parts = step.products(step.g, squares=False)
    return parts[:, 0, : step.k + 1].sum(0)


def weights_on_device(
    problem: Tensor, margin: Tensor, floor: bool, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights of g̃ = g + Gᵀw: (k,), and the dual's solution v★: (k,).

    `problem` is [GGᵀ, Gg]: (k, k + 1) in double precision; for the others see `project_on_device`.
    """
    problem = problem.contiguous()
    weights = torch.empty((2, len(problem)), dtype=torch.float64, device=problem.device)
    own = torch.empty(4, dtype=torch.int64, device=problem.device)
    flag = torch.empty((), dtype=torch.int32, device=problem.device)  # is not read
    _solve(problem, flag, None, weights, margin, counts, own, floor, flagged=False)
    return weights[0], weights[1]


def _solve(
    problem: Tensor, flag: Tensor, chosen: Tensor | None, weights: Tensor, margin: Tensor,
    counts: Tensor, own: Tensor, floor: bool, flagged: bool,
) -> None:  # fmt: skip
    """Fill `weights`: (2, k) with those of g̃, and with the dual's solution as it is."""
    n = len(problem)
    size = _size(n)
    tableau, state = (
        torch.empty((rows, size), dtype=torch.float64, device=problem.device) for rows in (size, 3)
    )
    kernels.solve[(1,)](
        problem, flag, chosen, tableau, state, weights, margin, counts, own, n, weights.shape[1],
        FLAGGED=flagged, INDEXED=chosen is not None, FLOOR=floor,
        SIZE=size, ROWS=size if size <= 32 else 16, num_warps=8 if size <= 64 else 16,
    )  # fmt: skip


class _Step:
    """One projection: its sizes, and what the kernels hand on to each other.

    `flag`, once rows were chosen: how many constraints g violates, and after the chosen ones were
    tried, whether that was not enough.
    """

    def __init__(self, g: Tensor, G: Tensor, margin: Tensor, floor: bool, counts: Tensor) -> None:
        self.g, self.G, self.margin, self.floor, self.counts = g, G, margin, floor, counts
        self.k, self.p = G.shape
        self.size = _size(self.k)
        self.weights = self._doubles(2, self.k)
        self.own = torch.empty(4, dtype=torch.int64, device=g.device)
        self.flag = torch.empty((), dtype=torch.int32, device=g.device)

    def choose(self) -> None:
        """The rows that g goes against the most."""
        self.chosen = torch.empty(CHOSEN, dtype=torch.int32, device=self.g.device)
        self.sizes = self._doubles(2, self.size)
        self.z = self._doubles(self.p)
        parts = self.products(self.g)
        kernels.choose[(1,)](
            parts, self.margin, self.weights, self.chosen, self.sizes, self.flag,
            self.k, len(parts),
            MOST=CHOSEN, SIZE=self.size, PARTS=triton.next_power_of_2(len(parts)), num_warps=16,
        )  # fmt: skip

    def problem(self, chosen: Tensor | None = None, flagged: bool = False) -> Tensor:
        """[GGᵀ, Gg]: (n, n + 1) in double precision, for all rows or the chosen ones."""
        n = self.k if chosen is None else len(chosen)
        flagged = flagged or chosen is not None
        block, most, warps = GRAM[_size(n)]
        programs, turns = self._shares(block, most)
        parts, problem = self._doubles(programs, n, n + 1), self._doubles(n, n + 1)
        kernels.gram[(programs,)](
            self.G, self.g, chosen, self.flag, parts, n, self.p, self.G.stride(0),
            FLAGGED=flagged, INDEXED=chosen is not None,
            SIZE=_size(n), BLOCK=block, TURNS=turns, num_warps=warps,
        )  # fmt: skip
        block = 32
        kernels.total[(triton.cdiv(problem.numel(), block),)](
            parts, self.flag, problem, problem.numel(), programs,
            FLAGGED=flagged, BLOCK=block, PARTS=triton.next_power_of_2(programs), num_warps=4,
        )  # fmt: skip
        return problem

    def large_problem(self) -> Tensor:
        """The same for any number of rows."""
        problem = torch.zeros((self.k, self.k + 1), dtype=torch.float64, device=self.g.device)
        for G, g in self._blocks():
            problem[:, : self.k].addmm_(G, G.T)
            problem[:, self.k].addmv_(G, g)
        return problem

    def large_result(self) -> Tensor:
        """What `apply` gives, for any number of rows."""
        return torch.cat([g + self.weights[0] @ G for G, g in self._blocks()]).to(self.g.dtype)

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """G and g in double precision, some columns at a time."""
        width = max(4096, (1 << 22) // self.k)
        for start in range(0, self.p, width):
            columns = slice(start, start + width)
            yield self.G[:, columns].double(), self.g[columns].double()

    def solve(self, problem: Tensor, chosen: Tensor | None = None, flagged: bool = False) -> None:
        """The weights of g̃, and those of z: the dual's solution as it is, without a shift."""
        _solve(
            problem, self.flag, chosen, self.weights, self.margin, self.counts, self.own,
            floor=self.floor, flagged=flagged or chosen is not None,
        )  # fmt: skip

    def apply(self, z: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """g̃ from its weights, and z; into `out` only where that was flagged."""
        block, most, warps = APPLY[self.size]
        programs, turns = self._shares(block, most)
        g_tilde = torch.empty_like(self.g) if out is None else out
        kernels.apply[(programs,)](
            self.G, self.g, self.weights, self.flag, g_tilde, z,
            self.k, self.p, self.G.stride(0),
            FLAGGED=out is not None, BOTH=z is not None,
            SIZE=self.size, BLOCK=block, TURNS=turns, num_warps=warps,
        )  # fmt: skip
        return g_tilde

    def judge(self) -> None:
        """Let the flag stand unless z solves the whole problem."""
        parts = self.products(self.z, flagged=True, squares=False)
        kernels.judge[(1,)](
            parts, self.weights, self.sizes, self.flag, self.k, len(parts), TOLERANCE,
            SIZE=self.size, PARTS=triton.next_power_of_2(len(parts)), num_warps=16,
        )  # fmt: skip

    def products(self, z: Tensor, flagged: bool = False, squares: bool = True) -> Tensor:
        """Shares of Gz with |z|² after it and, if asked for, of the rows' squares.

        These are (programs, 2, size); squares that were not asked for are not set.
        """
        rows, block, most, warps = PRODUCTS
        programs, turns = self._shares(block, most if self.p < MANY * 2**11 else MANY)
        parts = self._doubles(programs, 2, self.size)
        kernels.products[(programs, self.size // rows)](
            self.G, z, self.flag, parts, self.k, self.p, self.G.stride(0),
            FLAGGED=flagged, SQUARES=squares, SIZE=self.size,
            ROWS=rows, BLOCK=block, TURNS=turns, num_warps=warps,
        )  # fmt: skip
        return parts

    def _shares(self, block: int, most: int) -> tuple[int, int]:
        """How many programs there are, and how many blocks of columns each of them takes."""
        programs = min(triton.cdiv(self.p, block), most)
        return programs, triton.cdiv(self.p, block * programs)

    def _doubles(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self.g.device)


def _size(n: int) -> int:
    """Rows of a block that holds n constraints and g."""
    return max(16, int(triton.next_power_of_2(n + 1)))
