"""The projection on a GPU, without waiting for it: a Triton kernel solves the dual.

One program holds the whole problem, so the steps of the active-set method follow each other inside
the kernel, and a step of GEM can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combination", "gram"]


#: From this many tasks on, Gg is looked at before GGᵀ is summed: it costs two small kernels, and
#: saves the large one in every step without a violation.
LOOK_FIRST = 32


def gram(G: Tensor, g: Tensor) -> Tensor:
    """[GGᵀ, Gg]: (k, k + 1) in double precision; only Gg is defined if none of it is negative."""
    k, p = G.shape
    if k > 127:
        return _gram_by_blocks(G, g)
    size = max(16, triton.next_power_of_2(k + 1))
    block, most, warps = _gram_shape(size)
    programs = min(triton.cdiv(p, block), most)
    turns = triton.cdiv(p, block * programs)
    parts = torch.empty((programs, k, k + 1), dtype=torch.float64, device=G.device)
    look = k >= LOOK_FIRST
    products = _products(G, g, size) if look else parts
    _gram_kernel[(programs,)](
        G, g, products, parts, k, p, G.stride(0),
        LOOK=look, SIZE=size, BLOCK=block, TURNS=turns, num_warps=warps,
    )  # fmt: skip
    problem = parts.sum(0)
    if look:
        problem[:, k] = products
    return problem


def _gram_shape(size: int) -> tuple[int, int, int]:
    """Columns per turn, programs and warps; measured on an H200."""
    return {16: (16, 264, 4), 32: (16, 264, 4), 64: (32, 264, 4), 128: (16, 132, 8)}[size]


def _products(G: Tensor, g: Tensor, size: int) -> Tensor:
    """Gg: (k,) in double precision."""
    k, p = G.shape
    block = 64
    programs = min(triton.cdiv(p, block), 264)
    turns = triton.cdiv(p, block * programs)
    parts = torch.empty((programs, k), dtype=torch.float64, device=G.device)
    _products_kernel[(programs,)](
        G, g, parts, k, p, G.stride(0), SIZE=size, BLOCK=block, TURNS=turns, num_warps=8
    )
    return parts.sum(0)


def combination(
    problem: Tensor,
    margin: Tensor,
    floor: bool,
    counts: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The weights w: (k,) of g̃ = g + Gᵀw, zero if g violates no constraint.

    `problem` is what `gram` gave, `margin` γ: () as a double, which a kernel cannot be given as a
    number. Adds to `counts`: (4,) whether there was a violation, how many
    constraints were violated, how many bind, and how many steps it took to find out.
    """
    k = len(problem)
    size = max(16, triton.next_power_of_2(k + 1))
    weights = torch.empty(k, dtype=dtype, device=problem.device)
    tableau = torch.empty((size, size), dtype=torch.float64, device=problem.device)
    state = torch.empty((3, size), dtype=torch.float64, device=problem.device)
    rows = size if size <= 32 else 16  # of the tableau at a time; measured on an H200
    _dual_kernel[(1,)](
        problem, tableau, state, weights, counts, margin, k,
        FLOOR=floor, SIZE=size, ROWS=rows, num_warps=8 if size <= 64 else 16,
    )  # fmt: skip
    return weights


def _gram_by_blocks(G: Tensor, g: Tensor) -> Tensor:
    k, p = G.shape
    problem = torch.zeros((k, k + 1), dtype=torch.float64, device=G.device)
    width = max(4096, (1 << 22) // k)
    for start in range(0, p, width):
        block = G[:, start : start + width].double()
        problem[:, :k].addmm_(block, block.T)
        problem[:, k].addmv_(block, g[start : start + width].double())
    return problem


@triton.jit
def _gram_kernel(
    G, g, products, parts, k, p, stride,
    LOOK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Each program sums its share of the columns; products of float32 numbers are exact here."""
    program = tl.program_id(0)
    i = tl.arange(0, SIZE)
    if LOOK:
        b = tl.load(products + i, mask=i < k, other=0.0)
        if tl.min(b, 0) >= 0:
            return
    total = tl.zeros((SIZE, SIZE), dtype=tl.float64)
    for turn in range(TURNS):
        columns = (program * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < p
        rows = tl.load(
            G + i[:, None] * stride + columns[None, :],
            mask=(i[:, None] < k) & inside[None, :],
            other=0.0,
        ).to(tl.float64)
        both = rows
        if not LOOK:
            last = tl.load(g + columns, mask=inside, other=0.0).to(tl.float64)
            both = tl.where(i[:, None] == k, last[None, :], rows)
        total += tl.dot(rows, tl.trans(both))
    place = parts + program * k * (k + 1) + i[:, None] * (k + 1) + i[None, :]
    tl.store(place, total, mask=(i[:, None] < k) & (i[None, :] <= k))


@triton.jit
def _products_kernel(
    G, g, parts, k, p, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Each program sums its share of the columns."""
    program = tl.program_id(0)
    i = tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), dtype=tl.float64)
    for turn in range(TURNS):
        columns = (program * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < p
        rows = tl.load(
            G + i[:, None] * stride + columns[None, :],
            mask=(i[:, None] < k) & inside[None, :],
            other=0.0,
        ).to(tl.float64)
        last = tl.load(g + columns, mask=inside, other=0.0).to(tl.float64)
        total += tl.sum(rows * last[None, :], 1)
    tl.store(parts + program * k + i, total, mask=i < k)


@triton.jit
def _dual_kernel(
    problem, tableau, state, weights, counts, margin, k,
    FLOOR: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Minimise ½ vᵀAv + bᵀv over v ≥ 0 by Lawson and Hanson's method on a swept tableau.

    The tableau is [[A, b], [bᵀ, 0]] with unit diagonal. Sweeping the working set's rows makes its
    last column hold minus the solution inside the set, and the slope outside it.
    """
    i = tl.arange(0, SIZE)
    real = i < k
    gamma = tl.load(margin)
    b = tl.load(problem + i * (k + 1) + k, mask=real, other=0.0)
    diagonal = tl.load(problem + i * (k + 1) + i, mask=real, other=0.0)
    length = tl.where(diagonal > 0, tl.sqrt(diagonal), 1.0)
    violated = tl.sum(((b < 0) & real).to(tl.int32), 0)
    tl.store(state + i, length)
    tl.debug_barrier()

    # The tableau with unit diagonal; under "floor", from the start g + γ Σ g_k.
    for first in range(0, SIZE, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r[:, None] < k) & real[None, :]
        A = tl.load(problem + r[:, None] * (k + 1) + i[None, :], mask=inside, other=0.0)
        row_length = tl.load(state + r)
        row_b = tl.load(problem + r * (k + 1) + k, mask=r < k, other=0.0)
        if FLOOR:
            row_b += gamma * tl.sum(A, 1)
        row_b = row_b / row_length
        A = A / row_length[:, None] / length[None, :]
        A = tl.where(i[None, :] == k, row_b[:, None], A)
        tl.store(tableau + r[:, None] * SIZE + i[None, :], A)
        tl.store(state + SIZE + r, row_b)
    tl.debug_barrier()
    slope = tl.load(state + SIZE + i)
    biggest = tl.max(tl.abs(slope), 0)
    tolerance = 1e-12 * tl.maximum(biggest, 1e-300)
    # last row of the tableau: bᵀ
    tl.store(tableau + k * SIZE + i, tl.where(real, slope, 0.0))
    tl.debug_barrier()

    v = tl.zeros((SIZE,), dtype=tl.float64)
    working = tl.zeros((SIZE,), dtype=tl.int32)
    barred = tl.zeros((SIZE,), dtype=tl.int32)
    entered = tl.sum(working, 0) - 1
    steps = tl.sum(working, 0)
    running = tl.minimum(violated, 1)
    while running > 0:
        column = tl.load(tableau + i * SIZE + k)
        s = -column
        # Towards s; if a multiplier reaches zero on the way, stop there: its constraint leaves.
        falling = (working > 0) & (s <= 0)
        leaving = tl.max(falling.to(tl.int32), 0)
        ratio = tl.where(falling, v / tl.where(falling, v - s, 1.0), float("inf"))
        first_zero = tl.argmin(ratio, 0).to(tl.int32)
        alpha = tl.where(leaving > 0, tl.min(ratio, 0), 1.0)
        v = tl.where(working > 0, tl.maximum(v + alpha * (s - v), 0.0), 0.0)
        v = tl.where((leaving > 0) & (i == first_zero), 0.0, v)
        # Otherwise the most violated constraint enters.
        free = real & (working == 0) & (barred == 0)
        candidate = tl.where(free, column, float("inf"))
        worst = tl.argmin(candidate, 0).to(tl.int32)
        done = (leaving == 0) & (tl.min(candidate, 0) >= -tolerance)

        q = tl.where(leaving > 0, first_zero, worst)
        pivot = tl.load(tableau + q * SIZE + q)
        # A row that depends on the working set up to rounding, or that would leave as it enters,
        # waits until another one has entered.
        dependent = (leaving == 0) & (pivot < 1e-11)
        returned = (leaving > 0) & (q == entered)
        barred = tl.where((i == q) & (dependent | returned), 1, barred)
        barred = tl.where((leaving == 0) & (dependent == 0) & (i != q), 0, barred)
        entered = tl.where(leaving == 0, q, entered)
        sweep = (done == 0) & (dependent == 0)
        working = tl.where(sweep & (i == q), 1 - leaving, working)
        if sweep:
            sign = tl.where(leaving > 0, -1.0, 1.0)
            # The swept tableau stays symmetric, so its row q is also its column q.
            row = tl.load(tableau + q * SIZE + i)
            tl.store(state + 2 * SIZE + i, row)
            scaled = row / pivot
            across = tl.where(i == q, -1.0 / pivot, sign * scaled)
            tl.debug_barrier()
            for first in range(0, SIZE, ROWS):
                r = first + tl.arange(0, ROWS)
                place = tableau + r[:, None] * SIZE + i[None, :]
                beside = tl.load(state + 2 * SIZE + r)
                new = tl.load(place) - beside[:, None] * scaled[None, :]
                down = tl.where(r == q, -1.0 / pivot, sign * beside / pivot)
                new = tl.where(i[None, :] == q, down[:, None], new)
                new = tl.where(r[:, None] == q, across[None, :], new)
                tl.store(place, new)
            tl.debug_barrier()
        steps += 1
        running = tl.where(done | (steps > 10 * k + 10), 0, running)

    free_weights = tl.where(v > 0, v / length, 0.0)  # without a violation, lengths are undefined
    active = tl.sum((v > 0).to(tl.int32), 0)
    added = tl.where(violated > 0, gamma, 0.0)
    tl.store(weights + i, free_weights + added, mask=real)
    c = tl.arange(0, 4)
    change = tl.where(c == 0, (violated > 0).to(tl.int32), 0)
    change = tl.where(c == 1, violated, change)
    change = tl.where(c == 2, active, change)
    change = tl.where(c == 3, steps, change)
    tl.store(counts + c, tl.load(counts + c) + change.to(tl.int64))
