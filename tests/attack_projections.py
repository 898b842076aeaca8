"""Projections, random and adversarial, against the bound that `gm.project` states.

python -m tests.attack_projections 1000000 --workers 2
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import gradmem as gm
from gradmem.projection import BOUNDS, MARGIN_RULES, Projection

MOST_ROWS, MOST_COLUMNS, MOST_NUMBERS = 200, 4000, 100_000
#: Large problems take most of the time, so that most have few rows: this share has up to 200.
LARGE, FEW_ROWS = 0.03, 12
MARGINS = (0.0, 0.0, 0.5, 1.0, 10.0)
DTYPES = (torch.float32, torch.float64)


class Problem(NamedTuple):
    """What `gm.project` is given, and which attacks it was made with."""

    g: Tensor
    G: Tensor
    margin: float
    rule: str
    kind: str


class Found(NamedTuple):
    """How far a solution is off, relative to its bound, and how long it took."""

    excess: float
    residual: float
    condition: str
    seconds: float
    label: str


# Attacks: they change G: (k, p) and g: (p,) in place.


def near_parallel(rng, g, G):
    """All rows along one of two directions, up to a distance of 1e-1 to 1e-16."""
    directions = rng.standard_normal((2, len(g)))
    apart = 10.0 ** -rng.uniform(1, 16)
    G[:] = directions[rng.integers(2, size=len(G))] + apart * G


def duplicated(rng, g, G):
    G[:] = G[rng.integers(1 + len(G) // 3, size=len(G))]


def opposite(rng, g, G):
    half = len(G) // 2
    G[half : 2 * half] = -G[:half]


def zero_rows(rng, g, G):
    G[rng.random(len(G)) < 0.3] = 0


def rank_deficient(rng, g, G):
    rank = rng.integers(1, 1 + max(1, min(G.shape) // 2))
    G[:] = rng.standard_normal((len(G), rank)) @ rng.standard_normal((rank, len(g)))


def ill_conditioned(rng, g, G):
    """Singular values that fall to as little as 1e-16 of the largest."""
    U, s, V = np.linalg.svd(G, full_matrices=False)
    G[:] = (U * np.logspace(0, -rng.uniform(4, 16), len(s))) @ V


def whole_numbers(rng, g, G):
    G[:], g[:] = rng.integers(-1, 2, G.shape), rng.integers(-2, 3, g.shape)


def sparse(rng, g, G):
    G *= rng.random(G.shape) < 0.1


def boundary(rng, g, G):
    """Let g be orthogonal to some rows up to rounding, or moved against them a little."""
    rows = G[: rng.integers(1, 6)]
    g -= rows.T @ np.linalg.lstsq(rows.T, g, rcond=None)[0]
    g -= rng.choice([0.0, 1e-16, 1e-12, 1e-7]) * rows.sum(0)


def against_all(rng, g, G):
    """Take g = −Σ rows, the step that every task objects to."""
    g[:] = -G.sum(0)


def against_one(rng, g, G):
    g[:] = -G[rng.integers(len(G))]


def surrounded(rng, g, G):
    """Rows that leave little but zero."""
    G[-1] = -G[:-1].sum(0)


def scaled_rows(rng, g, G):
    G *= 10.0 ** rng.uniform(-30, 30, (len(G), 1))


def scaled_all(rng, g, G):
    G *= 10.0 ** rng.uniform(-30, 30)


def scaled_g(rng, g, G):
    g *= 10.0 ** rng.uniform(-30, 30)


SHAPES = (near_parallel, duplicated, opposite, zero_rows, rank_deficient, ill_conditioned,
          whole_numbers, sparse)  # fmt: skip
STARTS = (boundary, against_all, against_one, surrounded)
SCALES = (scaled_rows, scaled_all, scaled_g)


def problem(i: int, most_numbers: int = MOST_NUMBERS) -> Problem:
    """The i-th problem: up to two attacks on the rows, one on g, and one or two on scales."""
    rng = np.random.default_rng(i)
    k = int(rng.integers(1, 1 + (MOST_ROWS if rng.random() < LARGE else FEW_ROWS)))
    p = 1 + int(min(MOST_COLUMNS, most_numbers / k) * rng.random() ** 5)
    G, g = rng.standard_normal((k, p)), rng.standard_normal(p)
    attacks = [*rng.choice(SHAPES, rng.integers(3), replace=False)]
    attacks += [*rng.choice(STARTS, rng.integers(2))]
    attacks += [*rng.choice(SCALES, rng.choice([0, 0, 1, 2]), replace=False)]
    for attack in attacks:
        attack(rng, g, G)
    # Elements stay within what both types hold with room for sums, and with all of their digits.
    G, g = (np.clip(values, -1e31, 1e31) for values in (G, g))
    if 0 < (largest := np.abs(g).max()) < 1e-30:
        g *= 1e-30 / largest
    kinds = rng.choice(3)  # now and then, g in single and G in double precision
    types = (DTYPES[min(kinds, 1)], DTYPES[kinds % 2])
    return Problem(
        torch.from_numpy(g).to(types[0]),
        torch.from_numpy(G).to(types[1]),
        float(rng.choice(MARGINS)),
        str(rng.choice(MARGIN_RULES)),
        "+".join(attack.__name__ for attack in attacks) or "random",
    )


def residuals(given: Problem, g_tilde: Tensor, v: Tensor) -> dict[str, float]:
    """The conditions of Karush, Kuhn and Tucker in double precision, as `gm.project` states them.

    `v` are the weights beside the margin: with γ for every row they make g̃ of g.
    """
    g, G, z = given.g.double(), given.G.double(), g_tilde.double()
    lengths = G.norm(dim=1)
    push = given.margin * G.sum(0)
    size = float(g.norm() + given.margin * lengths.sum())
    if given.rule == "floor":
        g = g + push
    else:
        z = z - push
    along = (G @ z) / torch.where(lengths > 0, lengths, 1.0)
    weights = v * lengths
    return {
        "primal": float(-along.min()) / size,
        "dual": float(-v.min()),
        "complementarity": float((weights * along).abs().max()) / size / float(weights.max() or 1),
        "stationarity": float((z - g - G.T @ v).norm()) / (size + float(weights.sum())),
    }


def attack(i: int, most_numbers: int = MOST_NUMBERS) -> Found:
    """Project the i-th problem and look at the result."""
    given = problem(i, most_numbers)
    k, p = given.G.shape
    label = f"problem {i}: k={k}, p={p}, {given.kind}, margin {given.margin} ({given.rule}), "
    label += f"{given.g.dtype}, {given.G.dtype}".replace("torch.", "")
    try:
        return look(i, given, label)
    except Exception as error:  # the others are still to be tried
        return Found(math.inf, math.inf, repr(error), 0.0, label)


def look(i: int, given: Problem, label: str) -> Found:
    projection = Projection(given.margin, given.rule)
    begin = time.perf_counter()
    g_tilde = projection(given.g, given.G)
    seconds = time.perf_counter() - begin
    if i % 16 == 0:
        again = gm.project(given.g, given.G, given.margin, given.rule)
        assert torch.equal(again, g_tilde), "twice, two results"
    assert g_tilde.isfinite().all(), "not finite"
    assert projection.last is not None
    assert projection.last.v.isfinite().all(), "v is not finite"
    if g_tilde is given.g:
        exact = given.G.double() @ given.g.double()
        slack = 1e-15 * given.G.double().norm(dim=1) * given.g.double().norm()
        assert bool((exact >= -slack).all()), "a violated constraint was overlooked"
        return Found(0.0, 0.0, "none violated", seconds, label)
    bound = max(BOUNDS[given.g.dtype], BOUNDS[given.G.dtype])
    found = residuals(given, g_tilde, projection.last.v)
    condition, residual = max(found.items(), key=lambda item: item[1])
    assert not math.isnan(residual), f"{found}"
    return Found(residual / bound, residual, condition, seconds, label)


class Summary:
    """The worst of many."""

    def __init__(self) -> None:
        self.worst: dict[str, Found] = {}
        self.slowest: Found | None = None
        self.projected = 0
        self.outside: list[Found] = []

    def add(self, found: Found) -> None:
        self.projected += found.condition != "none violated"
        kind = "single" if "float32" in found.label else "double"
        if kind not in self.worst or found.excess > self.worst[kind].excess:
            self.worst[kind] = found
        if self.slowest is None or found.seconds > self.slowest.seconds:
            self.slowest = found
        if found.excess > 1:
            self.outside.append(found)

    def __str__(self) -> str:
        lines = [f"{self.projected} had a violated constraint"]
        for kind, found in sorted(self.worst.items()):
            worst = f"{found.residual:.1e} ({found.condition})"
            lines.append(f"worst in {kind} precision: {worst}, {found.label}")
        if self.slowest is not None:
            lines.append(f"slowest: {1e3 * self.slowest.seconds:.1f} ms, {self.slowest.label}")
        for found in self.outside[:20]:
            lines.append(f"OUTSIDE: {found.residual:.1e} ({found.condition}), {found.label}")
        lines.append(f"{len(self.outside)} outside the bounds")
        return "\n".join(lines)


def attacks(n: int, workers: int = 1, most_numbers: int = MOST_NUMBERS) -> Iterator[Found]:
    """The first n problems, with so many elements of G at most."""
    one = partial(attack, most_numbers=most_numbers)
    if workers == 1:
        yield from map(one, range(n))
        return
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap_unordered(one, range(n), chunksize=500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin, summary = time.perf_counter(), Summary()
    for done, found in enumerate(attacks(options.n, options.workers), 1):
        summary.add(found)
        if done % 100_000 == 0:
            print(f"{done} after {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{options.n} projections in {time.perf_counter() - begin:.0f} s, {summary}")
    raise SystemExit(bool(summary.outside))


if __name__ == "__main__":
    main()
