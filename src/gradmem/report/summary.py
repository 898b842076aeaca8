"""Runs that differ in nothing but their seed, as one row with a mean and a 95% interval."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradmem.learners import LEARNERS
from gradmem.results import Run

__all__ = ["Estimate", "Row", "summarize"]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its 95% interval (Student's t; None for one seed)."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Estimate:
        """The estimate from one value per seed; None values (not defined) make it NaN."""
        numbers = [math.nan if value is None else value for value in values]
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
        text = format(self.mean, spec)
        return text if self.half_width is None else f"{text} ± {self.half_width:{spec.lstrip('+')}}"


@dataclass(frozen=True)
class Row:
    """One learner on one benchmark, over its seeds."""

    benchmark: str
    name: str
    runs: tuple[Run, ...]

    def estimate(self, key: str) -> Estimate:
        """Of a number that `result.json` holds: acc, bwt, fwt, seconds, …"""
        return Estimate.of([run.result[key] for run in self.runs])

    @property
    def R(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The mean accuracy matrix over the seeds."""
        return np.array([run.R for run in self.runs]).mean(axis=0)  # type: ignore[no-any-return]

    @property
    def first_task(self) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float64]]]:
        """Examples observed, and the mean accuracy on the first task after them."""
        curves = [run.result["curves"] for run in self.runs]
        accuracy = np.mean([np.array(curve["accuracy"])[:, 0] for curve in curves], axis=0)
        return curves[0]["examples"], accuracy


def summarize(runs: Sequence[Run]) -> list[Row]:
    """One row per experiment, benchmarks by name, learners in the paper's order.

    Rows whose names would be the same are told apart by the settings in which they differ.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_without_seed(run), sort_keys=True), []).append(run)
    members = sorted(groups.values(), key=lambda group: _place(group[0]))
    return [
        Row(group[0].config["benchmark"], _name(group[0], members), tuple(group))
        for group in members
    ]


def _without_seed(run: Run) -> dict[str, Any]:
    flat = {name: value for name, value in run.config.items() if name not in ("seed", "settings")}
    settings: dict[str, Any] = run.config.get("settings", {})
    return flat | settings


def _place(run: Run) -> tuple[Any, ...]:
    names = list(LEARNERS)
    learner = run.config["learner"]
    place = names.index(learner) if learner in names else len(names)
    return run.config["benchmark"], place, json.dumps(_without_seed(run), sort_keys=True)


def _name(run: Run, groups: Sequence[Sequence[Run]]) -> str:
    def same(other: Run) -> bool:
        return (other.config["benchmark"], other.name) == (run.config["benchmark"], run.name)

    alike = [_without_seed(group[0]) for group in groups if same(group[0])]
    own = _without_seed(run)
    differ = [name for name in own if any(other.get(name) != own[name] for other in alike)]
    details = ", ".join(f"{name}={own[name]}" for name in differ)
    return f"{run.name} ({details})" if details else run.name
