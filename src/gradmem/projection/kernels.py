"""The projection's kernels in Triton: sums over G's columns, the dual, and what comes of it.

A problem is stored as (n, n + 1) doubles, [GGᵀ, Gg] for n rows of G: all of them, or those that
`index` names. A kernel does nothing where its `flag` is zero: a step that is recorded as a CUDA
graph cannot leave it out. Sums over columns are shared out among programs, and summed up in a fixed
order, so that they come out the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["apply", "choose", "gram", "judge", "products", "solve", "total"]


@triton.jit
def products(
    G, z, flag, parts, k, p, stride,
    FLAGGED: tl.constexpr, SQUARES: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Each program's share of Gz and, after it, |z|²; if asked for, of the rows' squared lengths.

    Rows are shared out, too: `ROWS` of them to a program.
    """
    if FLAGGED:
        if tl.load(flag) == 0:
            return
    program = tl.program_id(0)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    along = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    for turn in range(TURNS):
        columns = (program * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < p
        last = tl.load(z + columns, mask=inside, other=0.0).to(tl.float64)
        rows = tl.load(
            G + i[:, None].to(tl.int64) * stride + columns[None, :],
            mask=(i[:, None] < k) & inside[None, :],
            other=0.0,
        ).to(tl.float64)
        rows = tl.where(i[:, None] == k, last[None, :], rows)
        along += rows * last[None, :]
        if SQUARES:
            squares += rows * rows
    place = parts + program * 2 * SIZE + i
    tl.store(place, tl.sum(along, 1))
    if SQUARES:
        tl.store(place + SIZE, tl.sum(squares, 1))


@triton.jit
def choose(
    parts, margin, weights, index, sizes, flag, k, programs,
    MOST: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The `MOST` rows that g goes against the most; flags whether it violates any.

    `sizes` get the rows' lengths and, last, |g|; `weights` what they are without those rows.
    """
    i = tl.arange(0, SIZE)
    real = i < k
    b = _summed(parts, i, programs, SIZE, PARTS)
    squares = _summed(parts + SIZE, i, programs, SIZE, PARTS)
    violated = tl.sum(((b < 0) & real).to(tl.int32), 0)
    tl.store(flag, tl.maximum(violated, _not_finite(b, squares, real)))
    length = tl.sqrt(squares)
    tl.store(sizes + i, length, mask=i <= k)
    nothing = tl.zeros((SIZE,), dtype=tl.float64)
    tl.store(weights + i, nothing + tl.where(violated > 0, tl.load(margin), 0.0), mask=real)
    tl.store(weights + k + i, nothing, mask=real)
    against = tl.where(real, b / tl.where(length > 0, length, 1.0), float("inf"))
    against = tl.where(against == against, against, float("inf"))  # NaN has no place in an order
    # Place in the order: how many come before. A row of places beside a column of them.
    tl.store(sizes + SIZE + i, against)
    tl.debug_barrier()
    others = tl.load(sizes + SIZE + i)
    before = (others[None, :] < against[:, None]) | (
        (others[None, :] == against[:, None]) & (i[None, :] < i[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    tl.store(index + rank, i, mask=real & (rank < MOST))


@triton.jit
def gram(
    G, g, index, flag, parts, n, p, stride,
    FLAGGED: tl.constexpr, INDEXED: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Each program's share of a problem; products of float32 numbers are exact in double."""
    if FLAGGED:
        if tl.load(flag) == 0:
            return
    program = tl.program_id(0)
    i = tl.arange(0, SIZE)
    row = tl.load(index + i, mask=i < n, other=0) if INDEXED else i
    share = tl.zeros((SIZE, SIZE), dtype=tl.float64)
    for turn in range(TURNS):
        columns = (program * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < p
        rows = tl.load(
            G + row[:, None].to(tl.int64) * stride + columns[None, :],
            mask=(i[:, None] < n) & inside[None, :],
            other=0.0,
        ).to(tl.float64)
        last = tl.load(g + columns, mask=inside, other=0.0).to(tl.float64)
        both = tl.where(i[:, None] == n, last[None, :], rows)
        share += tl.dot(rows, tl.trans(both))
    place = parts + program * n * (n + 1) + i[:, None] * (n + 1) + i[None, :]
    tl.store(place, share, mask=(i[:, None] < n) & (i[None, :] <= n))


@triton.jit
def total(
    parts, flag, sums, n, programs,
    FLAGGED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The programs' shares, (programs, n), summed up: (n,)."""
    if FLAGGED:
        if tl.load(flag) == 0:
            return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, PARTS)
    inside = (r[:, None] < programs) & (c[None, :] < n)
    values = tl.load(parts + r[:, None] * n + c[None, :], mask=inside, other=0.0)
    tl.store(sums + c, tl.sum(values, 0), mask=c < n)


@triton.jit
def apply(
    G, g, weights, flag, g_tilde, z, k, p, stride,
    FLAGGED: tl.constexpr, BOTH: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """g̃ = g + Gᵀw; if both are asked for, also z, the same with the second row of `weights`."""
    if FLAGGED:
        if tl.load(flag) == 0:
            return
    program = tl.program_id(0)
    i = tl.arange(0, SIZE)
    w = tl.load(weights + i, mask=i < k, other=0.0)
    moved = tl.sum((w != 0).to(tl.int32), 0) > 0  # so for NaN
    if BOTH:
        w_z = tl.load(weights + k + i, mask=i < k, other=0.0)
        moved = moved | (tl.sum((w_z != 0).to(tl.int32), 0) > 0)
    for turn in range(TURNS):
        columns = (program * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < p
        new = tl.load(g + columns, mask=inside, other=0.0).to(tl.float64)
        other = new
        if moved:
            rows = tl.load(
                G + i[:, None].to(tl.int64) * stride + columns[None, :],
                mask=(i[:, None] < k) & inside[None, :],
                other=0.0,
            ).to(tl.float64)
            new += tl.sum(rows * w[:, None], 0)
            if BOTH:
                other += tl.sum(rows * w_z[:, None], 0)
        tl.store(g_tilde + columns, new, mask=inside)
        if BOTH:
            tl.store(z + columns, other, mask=inside)


@triton.jit
def judge(
    parts, weights, sizes, flag, k, programs, tolerance, SIZE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Let the flag stand unless z solves the whole problem.

    It does if it violates nothing and meets exactly what has a weight (the conditions of Karush,
    Kuhn and Tucker).
    """
    if tl.load(flag) == 0:
        return
    i = tl.arange(0, SIZE)
    along = _summed(parts, i, programs, SIZE, PARTS)
    slack = tolerance * tl.load(sizes + k) * tl.load(sizes + i, mask=i < k, other=0.0)
    w_z = tl.load(weights + k + i, mask=i < k, other=0.0)
    right = (along >= -slack) & ((along <= slack) | (w_z <= 0.0))  # not so for NaN
    tl.store(flag, tl.max(tl.where((i < k) & (right == 0), 1, 0), 0))


@triton.jit
def solve(
    problem, flag, index, tableau, state, weights, margin, counts, own, n, k,
    FLAGGED: tl.constexpr, INDEXED: tl.constexpr, FLOOR: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Minimise ½ vᵀAv + bᵀv over v ≥ 0 by Lawson and Hanson's method on a swept tableau.

    Weights of a problem that is not finite are NaN.

    Sweeping the working set's rows of [A, b], A with a unit diagonal, makes b hold minus the
    solution inside the set and the slope outside it.
    """
    if FLAGGED:
        if tl.load(flag) == 0:
            return
    i = tl.arange(0, SIZE)
    real = i < n
    gamma = tl.load(margin)
    b = tl.load(problem + i * (n + 1) + n, mask=real, other=0.0)
    diagonal = tl.load(problem + i * (n + 1) + i, mask=real, other=0.0)
    length = tl.where(diagonal > 0, tl.sqrt(diagonal), 1.0)
    violated = tl.sum(((b < 0) & real).to(tl.int32), 0)
    broken = _not_finite(b, diagonal, real)
    tl.store(state + i, length)
    tl.debug_barrier()
    for first in range(0, SIZE, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r[:, None] < n) & real[None, :]
        A = tl.load(problem + r[:, None] * (n + 1) + i[None, :], mask=inside, other=0.0)
        row_length = tl.load(state + r)
        row_b = tl.load(problem + r * (n + 1) + n, mask=r < n, other=0.0)
        if FLOOR:
            row_b += gamma * tl.sum(A, 1)
        A = A / row_length[:, None] / length[None, :]
        tl.store(tableau + r[:, None] * SIZE + i[None, :], A)
        tl.store(state + SIZE + r, row_b / row_length)
    tl.debug_barrier()
    b = tl.load(state + SIZE + i)
    tolerance = 1e-10 * tl.maximum(tl.max(tl.abs(b), 0), 1e-300)

    v = tl.zeros((SIZE,), dtype=tl.float64)
    working = tl.zeros((SIZE,), dtype=tl.int32)
    barred = tl.zeros((SIZE,), dtype=tl.int32)
    steps = tl.minimum(violated, 0)
    entered = steps - 1
    running = tl.where(broken > 0, 0, tl.minimum(violated, 1))
    while running > 0:
        v, q, leaving, done = _next(v, b, working, barred, real, i, tolerance)
        across = tl.load(tableau + q * SIZE + i)
        pivot = tl.load(tableau + q * SIZE + q)
        barred, entered, sweep = _admit(barred, entered, pivot, q, leaving, done, i)
        working = tl.where(sweep & (i == q), 1 - leaving, working)
        if sweep:
            sign = tl.where(leaving > 0, -1.0, 1.0)
            scaled = across / pivot
            edge = tl.where(i == q, -1.0 / pivot, sign * scaled)
            b_q = tl.sum(tl.where(i == q, b, 0.0), 0)
            b = tl.where(i == q, sign * b_q / pivot, b - scaled * b_q)
            tl.store(state + 2 * SIZE + i, across)
            tl.debug_barrier()
            for first in range(0, SIZE, ROWS):
                r = first + tl.arange(0, ROWS)
                place = tableau + r[:, None] * SIZE + i[None, :]
                beside = tl.load(state + 2 * SIZE + r)
                new = tl.load(place) - beside[:, None] * scaled[None, :]
                down = tl.where(r == q, -1.0 / pivot, sign * beside / pivot)
                new = tl.where(i[None, :] == q, down[:, None], new)
                new = tl.where(r[:, None] == q, edge[None, :], new)
                tl.store(place, new)
            tl.debug_barrier()
        steps += 1
        running = tl.where(done | (steps > 10 * n + 10), 0, running)

    w = tl.where(v > 0, v / length, 0.0)
    w = tl.where(broken > 0, float("nan"), w)
    if INDEXED:
        violated = tl.load(flag)  # also among the rows that were not chosen
    added = tl.where(violated > 0, gamma, 0.0)
    place = tl.load(index + i, mask=real, other=0) if INDEXED else i
    tl.store(weights + place, w + added, mask=real)
    tl.store(weights + k + place, w, mask=real)
    c = tl.arange(0, 4)
    change = tl.where(c == 0, (violated > 0).to(tl.int32), 0)
    change = tl.where(c == 1, violated, change)
    change = tl.where(c == 2, tl.sum((v > 0).to(tl.int32), 0), change)
    change = tl.where((c == 3) & (broken == 0), steps, tl.where(broken > 0, 0, change)).to(tl.int64)
    before = tl.load(counts + c)
    if FLAGGED and not INDEXED:  # the chosen rows were not enough: count this instead
        before -= tl.load(own + c)
    tl.store(own + c, change)
    tl.store(counts + c, before + change)


@triton.jit
def _next(v, b, working, barred, real, i, tolerance):
    """Go towards the working set's solution; who leaves on the way, or else who enters then."""
    s = -b
    falling = (working > 0) & (s <= 0)
    ratio = tl.where(falling, v / tl.maximum(v - s, 1e-300), float("inf"))
    alpha, first_zero = tl.min(ratio, 0, return_indices=True)
    leaving = (alpha < float("inf")).to(tl.int32)
    alpha = tl.where(leaving > 0, alpha, 1.0)
    v = tl.where(working > 0, tl.maximum(v + alpha * (s - v), 0.0), 0.0)
    v = tl.where((leaving > 0) & (i == first_zero), 0.0, v)
    free = real & (working == 0) & (barred == 0)
    lowest, worst = tl.min(tl.where(free, b, float("inf")), 0, return_indices=True)
    q = tl.where(leaving > 0, first_zero, worst).to(tl.int32)
    done = (leaving == 0) & (lowest >= -tolerance)
    return v, q, leaving, done


@triton.jit
def _admit(barred, entered, pivot, q, leaving, done, i):
    """Whether q may be swept.

    A row that depends on the working set up to rounding (the pivot is the square of its distance),
    or that would leave as it enters, waits until another one has entered.
    """
    dependent = (leaving == 0) & (pivot < 1e-11)
    returned = (leaving > 0) & (q == entered)
    barred = tl.where((i == q) & (dependent | returned), 1, barred)
    barred = tl.where((leaving == 0) & (dependent == 0) & (i != q), 0, barred)
    entered = tl.where(leaving == 0, q, entered)
    return barred, entered, (done == 0) & (dependent == 0)


@triton.jit
def _not_finite(b, squares, real):
    """1 if one of the rows' products or squares is not finite, else 0."""
    bad = (b - b != 0) | (squares - squares != 0)
    return tl.max((bad & real).to(tl.int32), 0)


@triton.jit
def _summed(parts, i, programs, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """What `products` left, summed up."""
    r = tl.arange(0, PARTS)
    place = parts + r[:, None] * 2 * SIZE + i[None, :]
    return tl.sum(tl.load(place, mask=(r < programs)[:, None], other=0.0), 0)
