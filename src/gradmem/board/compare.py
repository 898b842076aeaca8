"""Cells side by side: with published numbers, with each other, and without their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradmem import published
from gradmem.board.kept import Kept
from gradmem.reports import Estimate, next_run

__all__ = ["INSIDE", "OUTSIDE", "Verdict", "difference", "verdict"]

#: The marks. The last three mean that there is nothing to compare, and why.
INSIDE, OUTSIDE, ONE_SEED, TRIAL = "inside", "outside", "one seed", "trial"
DIFFERENT = "not compared"


@dataclass(frozen=True)
class Verdict:
    """A published ACC, and whether one more run made here would give such a value."""

    acc: float
    digits: int
    mark: str
    source: str
    differs: str
    low: float
    high: float
    """Where one more run would lie with 95% probability."""


def verdict(kept: Kept) -> Verdict | None:
    """What was published for a cell, if anything was."""
    place = (kept.column.benchmark, kept.column.memories, kept.entry)
    for found in published.board():
        if (found["benchmark"], found["memories"], found["entry"]) == place:
            low, high = next_run(kept.estimate("acc"), len(kept.runs))
            acc, rounding = found["acc"], 0.5 * 10.0 ** -found["digits"]
            inside = low - rounding - 1e-9 <= acc <= high + rounding + 1e-9
            mark = INSIDE if inside else OUTSIDE
            if kept.is_trial or not found["compared"]:
                mark = TRIAL if kept.is_trial else DIFFERENT
            elif len(kept.runs) < 2:
                mark = ONE_SEED
            about = {name: found[name] for name in ("acc", "digits", "source", "differs")}
            return Verdict(mark=mark, low=low, high=high, **about)
    return None


def difference(one: Kept, other: Kept, metric: str = "acc") -> Estimate | None:
    """What `one` has more than `other`, seed by seed, over the seeds that both have.

    With one seed the streams are the same, so that much of what varies cancels out. None if they
    have no seed in common, or are of different sizes.
    """
    if one.is_trial != other.is_trial or one.column.benchmark != other.column.benchmark:
        return None
    mine, theirs = (_by_seed(kept, metric) for kept in (one, other))
    seeds = [seed for seed in mine if seed in theirs]
    return Estimate.of([mine[seed] - theirs[seed] for seed in seeds]) if seeds else None


def _by_seed(kept: Kept, metric: str) -> dict[int, float]:
    values: Sequence[float] = kept.values(metric)
    return dict(zip(kept.seeds, values, strict=True))
