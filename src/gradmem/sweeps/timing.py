"""How long a sweep will take, from the runs made so far."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from gradmem.runs.experiment import Experiment

__all__ = ["TimeLeft"]

_Kind = tuple[str, str, int | None, bool]


class TimeLeft:
    """Estimates the time left from the mean seconds of each learner and number of epochs."""

    def __init__(self, experiments: Sequence[Experiment] = ()) -> None:
        self._left: Counter[_Kind] = Counter(map(_kind, experiments))
        self._later = 0
        self._seconds: dict[_Kind, list[float]] = defaultdict(list)
        self._work = 0.0
        self._start = time.monotonic()

    def plan(self, experiments: Sequence[Experiment], later: int) -> None:
        """More runs are to be made, and after them so `later` runs that are not known yet."""
        self._left.update(map(_kind, experiments))
        self._later = later

    def add(self, experiment: Experiment, seconds: float | None, now: bool = True) -> None:
        """A run is done, `now` or before; `seconds` is None if it failed."""
        kind = _kind(experiment)
        self._left[kind] -= 1
        if seconds is not None:
            self._seconds[kind].append(seconds)
            self._work += seconds if now else 0.0

    def left(self) -> float | None:
        """Seconds; None before the first run is done."""
        if not self._work:
            return None
        means = {kind: sum(known) / len(known) for kind, known in self._seconds.items() if known}
        other = sum(means.values()) / len(means)
        work = sum(n * means.get(kind, other) for kind, n in self._left.items())
        work += self._later * other
        # Seconds passed per second of work: less than 1 if several runs are made at a time.
        return work * (time.monotonic() - self._start) / self._work


def _kind(experiment: Experiment) -> _Kind:
    epochs = experiment.stream.get("epochs")
    return experiment.benchmark, experiment.learner, epochs, experiment.shuffled
