"""Running a sweep: all that is missing, then the chosen settings on the test sets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradmem.runs.folder import Run
from gradmem.sweeps.executors import Died, Executor, InTurn, Processes
from gradmem.sweeps.keys import Planned
from gradmem.sweeps.perform import ELSEWHERE, FINISHED, Outcome, Perform, stored
from gradmem.sweeps.plan import MODES, Sweep
from gradmem.sweeps.selection import Choice, Standings, choose
from gradmem.sweeps.store import Store
from gradmem.sweeps.timing import TimeLeft

__all__ = ["Event", "Finished", "LostWorkerError", "Phase", "run_sweep"]

#: How often to look for what other processes are doing, in seconds.
PATIENCE = 0.5


class LostWorkerError(RuntimeError):
    """A run's process ended before the run did."""


@dataclass(frozen=True)
class Event:
    """How far a sweep is, after each run and once at the start of each phase."""

    phase: str
    """"selection" or "final"; what else consists of runs has names of its own."""
    done: int
    total: int
    seconds_left: float | None
    best: list[Choice]
    run: Planned | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Finished:
    """A sweep that is done."""

    choices: list[Choice]
    runs: list[Run]
    """The runs to report: chosen settings, final seeds, test sets."""
    failed: list[tuple[Planned, str]]
    """The runs that failed, with their errors."""


def run_sweep(
    folder: str | os.PathLike[str],
    sweep: Sweep | None = None,
    executor: Executor | None = None,
    retry_failed: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> Finished:
    """Run what a sweep's folder lacks, choose the best settings, and run those on the test sets.

    It can be interrupted or killed at any time and called again, by several processes at once.

    Parameters
    ----------
    folder
        Where everything is kept.
    sweep
        A new sweep, or what the one in the folder is to be extended by; None to go on with it.
    executor
        Where runs are made; by default all cores, or this process if the sweep is for a GPU.
    retry_failed
        Whether runs that failed before are run again.
    on_event
        Called with an `Event` after every run.
    """
    store = Store(folder)
    planned = None
    if sweep is not None:  # what is wrong is found before it is kept
        planned = _plan(sweep)
        if not store.exists():
            _try_data(planned)
    whole = store.sweep() if sweep is None else store.open(sweep)
    if planned is None or whole != sweep:
        planned = _plan(whole)
    sweep = whole
    if executor is None:
        executor = InTurn() if sweep.device.startswith("cuda") else Processes()
    # Where seeds follow each other, the data of all of them are used again and again.
    keep = len(sweep.seeds) if sweep.device.startswith("cuda") else 1
    phase = Phase(store, executor, keep, retry_failed, on_event)
    failed = phase.make("selection", planned)
    choices = choose(store, planned, len(sweep.seeds))
    chosen = [(choice.benchmark, choice.learner, choice.settings) for choice in choices]
    final = [Planned(experiment) for experiment in sweep.final(chosen)]
    failed |= phase.make("final", final)
    made = [run for run in final if store.is_finished(run.key)]
    store.choose(
        {
            "select": sweep.select,
            "chosen_on": MODES[sweep.select],
            "choices": [_described(choice, made) for choice in choices],
        }
    )
    runs = [store.run(run.key) for run in made]
    return Finished(choices, runs, list(failed.values()))


def _plan(sweep: Sweep) -> list[Planned]:
    planned = [Planned(experiment) for experiment in sweep.experiments()]
    return list({run.key: run for run in planned}.values())


def _try_data(planned: Sequence[Planned]) -> None:
    """Raise what would end every run of a benchmark."""
    for run in {run.experiment.benchmark: run for run in reversed(planned)}.values():
        replace(run.experiment, device="cpu").continuum()


def _described(choice: Choice, made: Sequence[Planned]) -> dict[str, Any]:
    own = (choice.benchmark, choice.learner)
    keys = [run.key for run in made if (run.experiment.benchmark, run.experiment.learner) == own]
    return asdict(choice) | {"runs": keys}


class Phase:
    """Makes all of some runs, together with whoever else works in the folder.

    Parameters
    ----------
    store
        The folder.
    executor
        Where runs are made.
    continuums
        How many each process keeps; see `Perform`.
    retry_failed, on_event
        See `run_sweep`.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        continuums: int = 1,
        retry_failed: bool = False,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.store, self.executor, self.retry_failed = store, executor, retry_failed
        self.on_event = on_event or (lambda event: None)
        self.perform = Perform(store.path, continuums)
        self.standings = Standings()

    def make(self, name: str, planned: Sequence[Planned]) -> dict[str, tuple[Planned, str]]:
        """Come back when all are done; what failed, by key."""
        if self.retry_failed:
            self.store.forget_failures(run.key for run in planned if self.store.is_failed(run.key))
        clock = TimeLeft([run.experiment for run in planned])
        failed: dict[str, tuple[Planned, str]] = {}
        left = {run.key: run for run in planned}

        def count(run: Planned, outcome: Outcome, now: bool) -> None:
            del left[run.key]
            clock.add(run.experiment, outcome.seconds, now)
            if name == "selection":
                self.standings.add(run.experiment, outcome.acc)
            if outcome.kind != FINISHED:
                failed[run.key] = run, outcome.error

        def report(run: Planned | None = None, outcome: Outcome | None = None) -> None:
            done = len(planned) - len(left)
            best = self.standings.best()
            self.on_event(Event(name, done, len(planned), clock.left(), best, run, outcome))

        for run in planned:
            if run.key in left and self.store.is_done(run.key):
                count(run, stored(self.store, run), now=False)
        report()
        free = list(left.values())
        while left:
            with closing(self.executor(self.perform, free)) as outcomes:
                for run, answer in outcomes:
                    outcome = self._settled(run, answer) if isinstance(answer, Died) else answer
                    if outcome.kind != ELSEWHERE:
                        count(run, outcome, now=True)
                        report(run, outcome)
            free = []
            while left and not free:  # the rest is being made by others, or they died
                time.sleep(PATIENCE)
                for run in list(left.values()):
                    if self.store.is_done(run.key):
                        outcome = stored(self.store, run)
                        count(run, outcome, now=False)
                        report(run, outcome)
                    elif not self.store.is_claimed(run.key):
                        free.append(run)
        return failed

    def _settled(self, run: Planned, death: Died) -> Outcome:
        """Keep the death of a worker as its run's failure, unless the run is done or another's."""
        with self.store.claim(run.key) as mine:
            if not mine:
                return Outcome(ELSEWHERE)
            if not self.store.is_done(run.key):
                self.store.fail(run.key, run.experiment, LostWorkerError(str(death)))
            return stored(self.store, run)
