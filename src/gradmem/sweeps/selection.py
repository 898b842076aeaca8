"""Which settings are best: the mean ACC over seeds, on what the sweep holds out for choosing."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradmem.runs.experiment import Experiment, settings_key
from gradmem.runs.read_folder import Run
from gradmem.sweeps.store import Store
from gradmem.sweeps.trials import tried_settings

__all__ = ["Choice", "Standings", "choose", "select"]


@dataclass(frozen=True)
class Choice:
    """The best settings for a learner on a benchmark."""

    benchmark: str
    learner: str
    settings: dict[str, Any]
    acc: float
    """The mean over the seeds on the data that settings are chosen on; not one to report."""
    seeds: int
    considered: int
    """Settings that were compared."""
    failed: int
    """Settings that were not compared because a run with them failed, for example diverged."""


class Standings:
    """The best settings among the runs that are done so far.

    Settings with a failed run are not chosen. Of settings with the same mean ACC, the one with the
    smaller learning rate is better, then the one with smaller other values, by name.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], dict[str, _Entry]] = {}

    def add(self, experiment: Experiment, acc: float | None) -> None:
        """A run is done; `acc` is None if it failed."""
        place = self._entries.setdefault((experiment.benchmark, experiment.learner), {})
        settings = dict(experiment.settings)
        entry = place.setdefault(settings_key(settings), _Entry(settings, {}))
        entry.accs[experiment.seed] = None if acc is None or math.isnan(acc) else acc

    def best(self, seeds: int = 1) -> list[Choice]:
        """The best settings with at least `seeds` runs, where there are any."""
        choices = []
        for (benchmark, learner), entries in self._entries.items():
            failed = [e for e in entries.values() if None in e.accs.values()]
            sound = [e for e in entries.values() if None not in e.accs.values()]
            ready = [e for e in sound if len(e.accs) >= seeds]
            if ready:
                best = min(ready, key=lambda entry: entry.rank)
                numbers = (best.mean, len(best.accs), len(ready), len(failed))
                choices.append(Choice(benchmark, learner, best.settings, *numbers))
        return choices


@dataclass
class _Entry:
    settings: dict[str, Any]
    accs: dict[int, float | None]

    @property
    def mean(self) -> float:
        known = [acc for acc in self.accs.values() if acc is not None]
        return math.fsum(known) / len(known)  # exact, so that the order of runs changes nothing

    @property
    def rank(self) -> tuple[Any, ...]:
        rest = [_sortable(value) for _, value in sorted(self.settings.items())]
        return -self.mean, _sortable(self.settings.get("lr")), rest


def _sortable(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def select(folder: str | os.PathLike[str]) -> list[Choice]:
    """The best settings for each benchmark and learner of a sweep whose runs are done.

    A learner none of whose settings finished with all seeds has no choice.
    """
    store = Store(folder)
    sweep = store.sweep()
    return choose(store, tried_settings(store, sweep), len(sweep.seeds))


def choose(store: Store, planned: Sequence[Experiment], seeds: int) -> list[Choice]:
    """The best settings among these runs, all of them done."""
    missing = [experiment for experiment in planned if not store.is_done(experiment.key)]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(planned)} runs to choose from are missing in "
            f"{store.path}: `gradmem sweep {store.path}` goes on with them"
        )
    standings = Standings()
    for experiment in planned:
        outcome = store.outcome(experiment)
        standings.add(experiment, outcome.result["acc"] if isinstance(outcome, Run) else None)
    return standings.best(seeds)
