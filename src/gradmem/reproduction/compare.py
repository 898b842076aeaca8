"""Published numbers beside measured ones: inside the interval, or outside and why.

A published number is one run with one seed, so it is compared with the interval in which one more
run would lie with 95% probability, given the runs made here (Student's t, seeds as draws from a
normal distribution): mean ± t · s · √(1 + 1/n). The narrower interval of the mean, ± t · s / √n,
says how well the mean is known; a single run need not lie in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from gradmem.evaluation.metrics import transfer_metrics
from gradmem.published import appendix_b
from gradmem.reports import Estimate, next_run
from gradmem.reproduction.kept import Kept
from gradmem.reproduction.numbers import Number, second_values
from gradmem.reproduction.plan import N_TASKS, Setting
from gradmem.reproduction.text import number_text, title

__all__ = [
    "INSIDE",
    "OUTSIDE",
    "Cells",
    "Comparison",
    "compare",
    "compare_cells",
    "reasons",
]

#: The marks. The last three mean that there is nothing to compare, and why.
INSIDE, OUTSIDE, NOT_RUN, ONE_SEED, TRIAL = "inside", "outside", "not run", "one seed", "trial"


@dataclass(frozen=True)
class Comparison:
    """A published number, what was measured, and the mark."""

    number: Number
    mark: str
    estimate: Estimate | None = None
    low: float = math.nan
    high: float = math.nan
    """Where one more run would lie with 95% probability."""
    why: tuple[str, ...] = ()
    """If it is outside: the reasons that are known."""
    perhaps: tuple[str, ...] = ()
    """If it is outside: what may be a reason."""


@dataclass(frozen=True)
class Cells:
    """A whole matrix of Appendix B, cell by cell."""

    setting: Setting
    mark: str
    """Why it is not compared; "" if it is."""
    inside: int = 0
    cells: int = 0
    last_inside: int = 0
    """Of the last row, which ACC is the mean of."""
    last: int = 0
    difference: float = math.nan
    """The mean of |published − mean of the seeds|."""


@cache
def reasons() -> list[dict[str, Any]]:
    """Why a published number may lie outside of what is measured here, as far as it is known.

    Each has `when`, the values of a comparison that it is about, and `why`, or `perhaps` where it
    is a possible reason.
    """
    text = files("gradmem.reproduction").joinpath("reasons.json").read_text("utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def compare(numbers: Sequence[Number], kept: Mapping[Setting, Kept]) -> list[Comparison]:
    """Each number with its mark; those outside with the reasons that are known."""
    found = []
    for number in numbers:
        own = kept.get(number.setting)
        comparison = _compared(number, own)
        if own is not None and comparison.mark == OUTSIDE:
            others = [_compared(other, own) for other in second_values(number, numbers)]
            why, perhaps = _why(comparison, others, own)
            comparison = replace(comparison, why=tuple(why), perhaps=tuple(perhaps))
        found.append(comparison)
    return found


def compare_cells(setting: Setting, published: Any, kept: Kept | None) -> Cells:
    """The (T, T) accuracies of Appendix B, each with the interval of its own cell."""
    mark, _ = _comparable(kept, "acc")
    if kept is None or mark:
        return Cells(setting, mark or NOT_RUN)
    from scipy.special import stdtrit

    R = np.array([run.R for run in kept.row.runs])
    published = np.array(published)
    n = len(R)
    mean = R.mean(axis=0)
    half = stdtrit(n - 1, 0.975) * R.std(axis=0, ddof=1) * math.sqrt(1 + 1 / n)
    inside = np.abs(published - mean) <= half + 0.5e-4 + 1e-9  # printed with four digits
    whole, last = (int(inside.sum()), inside.size), (int(inside[-1].sum()), inside[-1].size)
    return Cells(setting, "", *whole, *last, float(np.abs(published - mean).mean()))


def _compared(number: Number, kept: Kept | None) -> Comparison:
    mark, values = _comparable(kept, number.metric)
    estimate = Estimate.of(values) if values else None
    if mark or estimate is None:
        return Comparison(number, mark or NOT_RUN, estimate)
    low, high = next_run(estimate, len(values))
    mark = INSIDE if _within(number.value, number.rounding, low, high) else OUTSIDE
    return Comparison(number, mark, estimate, low, high)


def _comparable(kept: Kept | None, metric: str) -> tuple[str, list[float | None]]:
    """The mark of what cannot be compared, or "", and the values of the seeds."""
    if kept is None:
        return NOT_RUN, []
    runs = list(zip(kept.row.runs, kept.alone, strict=True))
    # Seconds are only compared of runs that had the machine to themselves.
    values = [run.result[metric] for run, alone in runs if alone or metric != "seconds"]
    if kept.is_trial:
        return TRIAL, values
    return {0: NOT_RUN, 1: ONE_SEED}.get(len(values), ""), values


def _from_published_baseline(number: Number, kept: Kept) -> list[str]:
    """Whether an FWT is outside because the published run began from another untrained network."""
    theirs = appendix_b()[number.setting.benchmark][number.setting.learner]["baseline"]
    runs = kept.row.runs
    values = [transfer_metrics(run.R, theirs).fwt for run in runs]
    estimate = Estimate.of(values)
    if not _within(number.value, number.rounding, *next_run(estimate, len(values))):
        return []
    ours = [float(np.mean(run.result["baseline"][1:])) for run in runs]
    return [
        "FWT is counted from what an untrained network reaches: "
        f"{np.mean(theirs[1:]):.3f} in the published run, {min(ours):.3f} to {max(ours):.3f} here. "
        f"Counted from the former, FWT is {estimate.mean:+.3f} here, and the published value is "
        "inside."
    ]


def _within(value: float, rounding: float, low: float, high: float) -> bool:
    return low - rounding - 1e-9 <= value <= high + rounding + 1e-9


def _why(
    comparison: Comparison, others: Sequence[Comparison], kept: Kept
) -> tuple[list[str], list[str]]:
    """Reasons that are known, and possible ones."""
    number, low, high = comparison.number, comparison.low, comparison.high
    found = [
        f"The paper has two values for this; the other, {number_text(other.number)} in "
        f"{title(other.number.part)}, is inside."
        for other in others
        if other.mark == INSIDE
    ]
    scale = N_TASKS / (N_TASKS - 1)
    if (
        number.metric in ("bwt", "fwt")
        and number.printed is None
        and _within(number.value * scale, number.rounding * scale, low, high)
    ):
        found.append(
            "The released code divides by T where the equation has T − 1; multiplied by "
            f"{N_TASKS}/{N_TASKS - 1} it is inside."
        )
    perhaps = []
    if number.metric == "fwt" and number.part == "appendix-b":
        perhaps += _from_published_baseline(number, kept)
    about = {
        "part": number.part,
        "benchmark": number.setting.benchmark,
        "learner": number.setting.learner,
        "epochs": number.setting.epochs,
        "shuffled": number.setting.shuffled,
        "metric": number.metric,
        "side": "above" if number.value > high else "below",
    }
    fitting = [
        known
        for known in reasons()
        if all(about[name] in values for name, values in known["when"].items())
    ]
    found += [known["why"] for known in fitting if "why" in known]
    perhaps += [known["perhaps"] for known in fitting if "perhaps" in known]
    return found, perhaps
