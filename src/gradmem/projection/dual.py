"""The dual in double precision, on the host: active-set methods from inner products or factors."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Array", "IllConditionedError", "dual", "least_distance", "solve"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


def solve(A: Array, b: Array) -> tuple[Array, int]:
    """Minimise ½ vᵀAv + bᵀv over v ≥ 0, whatever A: (k, k) is; v★: (k,) and the steps it took.

    A has ones or zeros on its diagonal, and b: (k,) elements of at most 1 in size. Where inner
    products do not tell which rows are dependent, what they do tell is used: A up to rounding.
    """
    try:
        v, steps = dual(A, b)
        if (A @ v + b).min() >= -1e-10 * (1.0 + v.sum()):
            return v, steps
    except IllConditionedError:
        pass
    # A = RᵀR, so with Rᵀd = b the problem is min |Rv + d|.
    values, vectors = np.linalg.eigh(A)
    root = np.sqrt(np.maximum(values, 0.0))
    kept = root > 1e-8 * root.max()
    R = root[kept, None] * vectors[:, kept].T
    d = (vectors[:, kept].T @ b) / root[kept]
    lengths = np.linalg.norm(R, axis=0)
    lengths[lengths == 0] = 1.0
    v, steps = least_distance(R / lengths, d)
    return v / lengths, steps


class IllConditionedError(ArithmeticError):
    """Rows are so close to dependent that their inner products do not tell what to do."""


def dual(A: Array, b: Array) -> tuple[Array, int]:
    """Minimise ½ vᵀAv + bᵀv over v ≥ 0 (equation 12); v★: (k,) and the steps it took.

    A = GGᵀ: (k, k) and b = Gg: (k,).

    The active-set method of Lawson and Hanson in its form for Gram matrices: constraints enter the
    working set one at a time, the most violated first. A row that depends on those in the set up
    to rounding waits, so that the rows in it stay independent even where A is singular; the
    solution settles such a row, too, or does not, which the caller can see. The bound on the number
    of steps only guards against rounding.
    """
    k = len(b)
    length = np.sqrt(np.diag(A))
    length[length == 0] = 1.0  # a row of zeros constrains nothing
    A, b = A / np.outer(length, length), b / length
    tolerance = 1e-13 * max(1.0, float(np.abs(b).max()))
    v = np.zeros(k)
    working = np.zeros(k, dtype=bool)
    barred = np.zeros(k, dtype=bool)  # depends on the working set, or would leave as it enters
    steps = 0
    while steps < 10 * k:
        descent = -(A @ v + b)
        descent[working | barred] = -np.inf
        entering = int(descent.argmax())
        if descent[entering] <= tolerance:
            break
        if _depends(A, working, entering):
            barred[entering] = True
            continue
        working[entering] = True
        while True:
            steps += 1
            s = np.zeros(k)
            s[working] = np.linalg.solve(A[np.ix_(working, working)], -b[working])
            if (s[working] > 0).all():
                v, barred = s, np.zeros(k, dtype=bool)
                break
            if v[entering] == 0 and s[entering] <= 0:
                working[entering], barred[entering] = False, True
                break
            # Go towards s until the first multiplier reaches zero; its constraint leaves.
            ratio = np.full(k, np.inf)
            falling = working & (s <= 0)
            ratio[falling] = v[falling] / (v[falling] - s[falling])
            v = np.maximum(v + ratio.min() * (s - v), 0.0)
            working[ratio.argmin()] = False
            v[~working] = 0.0
    return v / length, steps


def _depends(A: Array, working: Bools, entering: int) -> bool:
    """Whether a row depends on the working set up to rounding; A has a unit diagonal.

    What decides is the square of the row's distance to the span of the others.
    """
    across = A[working, entering]
    if not len(across):
        return False
    combination = np.linalg.solve(A[np.ix_(working, working)], across)
    square = 1.0 - float(across @ combination)
    rounding = 1e-15 * (1.0 + float(np.abs(combination).sum())) ** 2
    if rounding < square < 1e7 * rounding:
        raise IllConditionedError
    return square <= rounding


def least_distance(R: Array, d: Array) -> tuple[Array, int]:
    """Minimise |Rv + d| over v ≥ 0; v★: (k,) and the steps it took.

    R: (m, k) has columns of length 1 or 0. Lawson and Hanson's method as in `dual`, with a QR
    factorisation of the working set in place of inner products: what is left of d is orthogonal to
    the set up to the last digits, however close to dependent its columns are. It has no part along
    a column that depends on them, which therefore never enters.
    """
    k = R.shape[1]
    tolerance = 1e-13 * float(np.linalg.norm(d))
    v, left = np.zeros(k), d
    working: list[int] = []
    barred: set[int] = set()  # would leave as they enter
    steps = 0
    while steps < 10 * k:
        slope = R.T @ left
        slope[[*working, *barred]] = np.inf
        entering = int(slope.argmin())
        if slope[entering] >= -tolerance:
            break
        before = list(working)
        working.append(entering)
        while True:
            steps += 1
            Q, T = np.linalg.qr(R[:, working])
            along = Q.T @ d
            s = np.linalg.solve(T, -along)
            if (s > 0).all():
                break
            # Go towards s until the first multiplier reaches zero; its column leaves.
            now, falling = v[working], s <= 0
            ratio = np.full(len(s), np.inf)
            ratio[falling] = now[falling] / np.maximum(now - s, 1e-300)[falling]
            v[working] = np.maximum(now + ratio.min() * (s - now), 0.0)
            v[working.pop(int(ratio.argmin()))] = 0.0
        if working == before:
            barred.add(entering)
            continue
        v[working], barred = s, set()
        left = d - Q @ along
        left = left - Q @ (Q.T @ left)
    return v, steps
