"""Runs that differ in nothing but their seed, as one row with a mean and a 95% interval."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradmem.learners import LEARNERS
from gradmem.runs.read_folder import Failure, Run, printable

__all__ = [
    "Estimate",
    "MemoryLine",
    "Row",
    "boundaries_of",
    "bounds",
    "conditions",
    "failed_lines",
    "flat_config",
    "leading",
    "memory_lines",
    "next_run",
    "seeds_text",
    "summarize",
]

#: Boundaries of a run that pictures draw; more would be a wall.
BOUNDARIES = 200

#: Entries of a config with seeds; `Result.save` writes `seeds`, of the continuum and the learner.
SEEDS = ("seed", "seeds")


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its 95% interval (Student's t; None for one seed)."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Estimate:
        """The estimate from one value per seed; None values (not defined) make it NaN."""
        numbers = [math.nan if value is None else float(value) for value in values]
        n = len(numbers)
        if n < 2:
            return cls(numbers[0], None)
        from scipy.special import stdtrit

        spread = float(np.std(numbers, ddof=1)) / math.sqrt(n)
        return cls(float(np.mean(numbers)), float(stdtrit(n - 1, 0.975)) * spread)

    def format(self, spec: str) -> str:
        """The mean, ± the half width where there is one; a dash where it is not defined."""
        if math.isnan(self.mean):
            return "–"
        digits = spec.lstrip("+")
        text = format(self.mean, spec.replace(digits, f"z{digits}"))  # z: no minus before 0
        return text if self.half_width is None else f"{text} ± {self.half_width:{digits}}"


def next_run(estimate: Estimate, n: int) -> tuple[float, float]:
    """Where one more run would lie with 95% probability, after `n` runs.

    Examples
    --------
    >>> low, high = next_run(Estimate.of([0.5, 0.6, 0.7]), 3)
    >>> round(low, 3), round(high, 3)
    (0.103, 1.097)
    """
    if estimate.half_width is None:
        return math.nan, math.nan
    half = estimate.half_width * math.sqrt(n + 1)  # t s √(1 + 1/n), where half_width is t s / √n
    return estimate.mean - half, estimate.mean + half


@dataclass(frozen=True)
class Row:
    """One learner on one benchmark, over its seeds.

    Runs that were tested on held-out data have a `benchmark` of their own (`Run.benchmark`).
    """

    benchmark: str
    name: str
    runs: tuple[Run, ...]

    def estimate(self, key: str) -> Estimate:
        """Of a number that `result.json` holds: acc, bwt, fwt, seconds, …"""
        return Estimate.of([run.result[key] for run in self.runs])

    def text(self, key: str) -> str:
        """The estimate of acc, bwt, fwt or seconds as tables have it."""
        if key == "seconds":
            return self.estimate(key).format(".1f")
        spec = ".2e" if self.digits is None else f".{self.digits}f"
        return self.estimate(key).format(spec if key == "acc" else f"+{spec}")

    @property
    def digits(self) -> int | None:
        """Digits after the point: 3 for accuracies, else what shows three; None: an exponent."""
        acc = abs(self.estimate("acc").mean)
        if self.score == "accuracy" or acc == 0 or math.isnan(acc):
            return 3
        size = math.floor(math.log10(acc))
        return max(0, 2 - size) if -4 <= size <= 6 else None

    @property
    def learner(self) -> str:
        return self.runs[0].learner

    @property
    def score(self) -> str:
        """The name of what R holds."""
        return self.runs[0].score

    @property
    def memory(self) -> int | None:
        """Examples remembered in all after the last task; None for learners without a memory."""
        config = flat_config(self.runs[0])
        each = int(self.runs[0].R.shape[1])
        for name, times in (("budget", 1), ("memories", each)):
            size = config.get(name)
            if type(size) is int and 0 < size < 2**31:
                return size * times
        return None

    @property
    def R(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The mean matrix over the seeds."""
        return np.array([run.R for run in self.runs]).mean(axis=0)  # type: ignore[no-any-return]

    @property
    def first_task(self) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float64]]]:
        """Examples observed, and the mean score on the first task after them."""
        curves = [run.result["curves"] for run in self.runs]
        accuracy = np.mean([np.array(curve["accuracy"])[:, 0] for curve in curves], axis=0)
        return curves[0]["examples"], accuracy

    @property
    def boundaries(self) -> list[int]:
        """Where the learner found that a task begins, after so many examples, in any run."""
        return sorted(n for run in self.runs for n in boundaries_of(run))


@dataclass(frozen=True)
class MemoryLine:
    """Rows that differ in nothing but how much they remember, least first."""

    benchmark: str
    name: str
    rows: tuple[Row, ...]

    @property
    def learner(self) -> str:
        return self.rows[0].learner


def summarize(runs: Sequence[Run]) -> list[Row]:
    """One row per experiment, benchmarks by name, learners in the paper's order.

    A row's name has the settings in which it differs from other rows of its learner, and the
    `conditions` in which it differs from other rows of its benchmark.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        # Only matrices and curves of one size have a mean.
        size = [run.R.shape, run.result["curves"]["examples"]]
        key = json.dumps([flat_config(run), run.score, size], sort_keys=True)
        groups.setdefault(key, []).append(run)
    members = sorted(groups.values(), key=lambda group: _place(group[0]))
    names = _names([(group[0], flat_config(group[0])) for group in members])
    return [
        Row(group[0].benchmark, name, tuple(group))
        for group, name in zip(members, names, strict=True)
    ]


def failed_lines(failures: Sequence[Failure]) -> list[str]:
    """Which settings failed and how, a line for each."""
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        settings = failure.config.get("settings")
        named = settings.items() if isinstance(settings, dict) else ()
        details = ", ".join(f"{name}={value}" for name, value in named)
        run = Run(failure.folder, failure.config, {})
        groups.setdefault(f"{run.benchmark}, {run.learner} ({details})", []).append(failure)
    return [
        printable(f"{name}: {len(group)} run{'s' if len(group) > 1 else ''}, {error}")
        for name, group in groups.items()
        for error in group[0].error.splitlines()[:1]
    ]


def boundaries_of(run: Run) -> list[int]:
    """Examples after which a run's learner found a new task; none if there are too many to draw."""
    found = [n for n in run.result.get("boundaries") or [] if n > 0]
    return found if len(found) <= BOUNDARIES else []


def bounds(rows: Sequence[Row]) -> tuple[float, float] | None:
    """(0, 1) if all scores of the rows lie between; None: an axis goes by its values."""
    results = [run.result for row in rows for run in row.runs]
    scores = [values for one in results for values in (one["R"], one["curves"]["accuracy"])]
    inside = (np.min(values) >= 0 and np.max(values) <= 1 for values in scores)
    return (0.0, 1.0) if all(inside) else None


def conditions(run: Run) -> dict[str, Any]:
    """A run's config without its benchmark, its learner, the learner's settings and the seed."""
    # Whether the data were shuffled is in every run's name.
    others = ("benchmark", "learner", "settings", *SEEDS, "shuffled", "code")
    return {name: value for name, value in run.config.items() if name not in others}


def seeds_text(rows: Sequence[Row]) -> str | None:
    """How many seeds the rows' means are over; None where there are no means."""
    numbers = sorted({len(row.runs) for row in rows})
    if numbers == [1]:
        return None
    few = f"{numbers[0]} to " if len(numbers) > 1 else ""
    return f"mean of {few}{numbers[-1]} seeds"


def leading(rows: Sequence[Row], limit: int) -> list[Row]:
    """At most `limit` rows, in their order: every learner's best ACC, then its second best, …"""
    acc = [row.estimate("acc").mean for row in rows]
    best_first = sorted(range(len(rows)), key=lambda i: -acc[i])
    seen: dict[str, int] = {}
    rank = {}
    for i in best_first:
        rank[i] = seen[rows[i].learner] = seen.get(rows[i].learner, 0) + 1
    kept = sorted(best_first, key=lambda i: rank[i])[:limit]
    return [rows[i] for i in sorted(kept)]


def memory_lines(rows: Sequence[Row]) -> list[MemoryLine]:
    """The lines of a plot of ACC against memory: only where there are two sizes or more."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.memory is not None:
            key = json.dumps(_without_memory(row.runs[0]), sort_keys=True)
            groups.setdefault(key, []).append(row)
    lines = [group for group in groups.values() if len({row.memory for row in group}) > 1]
    names = _names([(group[0].runs[0], _without_memory(group[0].runs[0])) for group in lines])
    return [
        MemoryLine(group[0].benchmark, name, tuple(sorted(group, key=lambda row: row.memory or 0)))
        for group, name in zip(lines, names, strict=True)
    ]


def flat_config(run: Run) -> dict[str, Any]:
    """A run's config without its seed, the learner's settings among the other entries.

    A setting that has the name of another entry is called `settings.NAME`.
    """
    others = (*SEEDS, "settings")
    flat = {name: value for name, value in run.config.items() if name not in others}
    settings: dict[str, Any] = run.config.get("settings", {})
    return flat | {f"settings.{k}" if k in flat else k: v for k, v in settings.items()}


def _without_memory(run: Run) -> dict[str, Any]:
    sizes = ("memories", "budget")
    return {name: value for name, value in flat_config(run).items() if name not in sizes}


def _place(run: Run) -> tuple[Any, ...]:
    names = list(LEARNERS)
    place = names.index(run.learner) if run.learner in names else len(names)
    text = json.dumps(flat_config(run), sort_keys=True)
    # Every second part is a number: 64 memories come before 256, and 256 before 1024.
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", text)
    natural = tuple(float(part) if i % 2 else part for i, part in enumerate(parts))
    return run.benchmark, place, natural


def _names(members: Sequence[tuple[Run, dict[str, Any]]]) -> list[str]:
    """A name for each run, with its settings; see `summarize` for those that are in the name."""
    same_benchmark: dict[str, list[dict[str, Any]]] = {}
    same_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run, settings in members:
        same_benchmark.setdefault(run.benchmark, []).append(conditions(run))
        same_name.setdefault((run.benchmark, run.name), []).append(settings)
    in_benchmark = {key: _differing(alike) for key, alike in same_benchmark.items()}
    in_name = {key: _differing(alike) for key, alike in same_name.items()}
    names = []
    for run, settings in members:
        shown = in_benchmark[run.benchmark] | in_name[run.benchmark, run.name]
        details = ", ".join(f"{name}={settings[name]}" for name in settings if name in shown)
        names.append(f"{run.name} ({printable(details)})" if details else run.name)
    return names


def _differing(alike: Sequence[dict[str, Any]]) -> set[str]:
    """The names whose values are not the same in all."""
    return {
        name
        for name in set().union(*alike)
        if any(other.get(name) != alike[0].get(name) for other in alike)
    }
