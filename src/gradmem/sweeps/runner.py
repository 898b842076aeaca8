"""Running a sweep: all that is missing, then the chosen settings on the test sets."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from gradmem.benchmarks import lookup
from gradmem.benchmarks.benchmark import Benchmark
from gradmem.files import plain
from gradmem.runs.compare import seed_numbers
from gradmem.runs.experiment import Experiment, require_device, settings_key
from gradmem.runs.read_folder import Failure, Run
from gradmem.sweeps.executors import Died, Elsewhere, Executor
from gradmem.sweeps.perform import Compute, Perform, perform_elsewhere
from gradmem.sweeps.places import executor_for_sweep
from gradmem.sweeps.plan import MODES, Grid, Sweep, final_numbers
from gradmem.sweeps.selection import Choice, Standings, choose
from gradmem.sweeps.store import Failed, Store
from gradmem.sweeps.timing import TimeLeft
from gradmem.sweeps.trials import Round, require_search, rounds, tried_settings
from gradmem.validation import one_of, positive_int

__all__ = [
    "Event",
    "Finished",
    "LostWorkerError",
    "Phase",
    "check_settings",
    "grid_of",
    "run_sweep",
    "sweep",
]

#: Seconds between looks at the runs of other processes.
POLL_SECONDS = 0.5


#: Workers that may die of one run before it counts as failed.
DEATHS = 3

#: The same for workers that were lost for other reasons.
LOSSES = 20


class LostWorkerError(RuntimeError):
    """A run's process ended before the run did."""


@dataclass(frozen=True)
class Event:
    """How far a sweep is, after each run and once at the start of each phase."""

    phase: str
    """"selection" or "final" in a sweep; `gradmem paper` has other phases."""
    done: int
    total: int
    seconds_left: float | None
    best: list[Choice]
    experiment: Experiment | None = None
    outcome: Run | Failure | None = None


@dataclass(frozen=True)
class Finished:
    """A sweep that is done."""

    choices: list[Choice]
    runs: list[Run]
    """The runs to report: chosen settings, final seeds, test sets."""
    failed: list[tuple[Experiment, str]]
    """The runs that failed, with their errors."""

    def __repr__(self) -> str:
        lines = [*map(self._line, self.choices), f"failed: {len(self.failed)}"]
        return "Finished(\n  " + "\n  ".join(lines) + "\n)"

    def _line(self, choice: Choice) -> str:
        own = (choice.benchmark, choice.learner)
        runs = [run for run in self.runs if (run.config["benchmark"], run.config["learner"]) == own]
        acc = f"{fmean(run.result['acc'] for run in runs):.3f}" if runs else "–"
        settings = "".join(f" {name}={value}" for name, value in plain(choice.settings).items())
        return f"{', '.join(map(lookup.shown, own))}{settings}: ACC {acc}, seeds: {len(runs)}"


def sweep(
    benchmark: str | Benchmark,
    learners: Iterable[str | lookup.LearnerKind] | Mapping[Any, Grid] | None = None,
    seeds: int | Sequence[int] = 3,
    *,
    out: str | os.PathLike[str],
    select: str = "validation",
    final_seeds: int | Sequence[int] | None = None,
    held_out: float = 0.1,
    first_tasks: int = 3,
    search: str = "grid",
    trials: int | None = None,
    workers: int | None = None,
    on: str | Executor | None = None,
    retry_failed: bool = False,
    on_event: Callable[[Event], None] | None = None,
    **common: Any,
) -> Finished:
    """Try settings of a grid, choose the best on held-out data, and run those on the test sets.

    It can be interrupted or killed at any time and called again; finished runs are not made again.
    A folder that holds a sweep is extended by new values and seeds.

    Parameters
    ----------
    benchmark
        Its name, `module:name`, or the record itself.
    learners
        Learner → setting → the values to try, or learners whose values are in the benchmark's
        `grid`; all that it has a grid for if left out. Each is a name, `module:name` or a class.
    seeds
        With which each setting is run: how many, from 0 on, or which.
    out
        The sweep's folder.
    select, held_out, first_tasks
        What settings are chosen on; see `gradmem.sweeps.Sweep`.
    final_seeds
        Of the runs that are reported: how many, or which. If left out, as many as `seeds`.
    search, trials
        Which settings are tried: "grid" for all, or "optuna" for so many; see
        `gradmem.sweeps.Sweep`.
    workers
        Processes on this machine; one per core if left out, or one for a GPU. Learners and
        benchmarks that other processes cannot import are run in this one.
    on
        Where runs are made: "ray", "slurm" and so on, see `gradmem.sweeps.executor_on`, or an
        executor; on this machine if left out.
    retry_failed, on_event
        See `run_sweep`.
    common
        What all runs have in common: what the benchmark takes (n_tasks, data, …), device, every.

    Examples
    --------
    >>> import tempfile, gradmem as gm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = gm.sweep("mnist-rotations", {"single": {"lr": [0.0001, 0.1]}}, seeds=1,
    ...                     out=folder, workers=1, data="sample", n_tasks=2, examples_per_task=100)
    >>> done.choices[0].settings, len(done.runs)
    ({'lr': 0.1}, 1)
    """
    if isinstance(final_seeds, int):
        final_seeds = final_numbers(select, positive_int("final_seeds", final_seeds))
    plan = Sweep(
        {lookup.benchmark_reference(benchmark): grid_of(benchmark, learners)},
        seeds=tuple(seed_numbers(seeds)),
        select=select,
        final_seeds=tuple(final_seeds or ()),
        held_out=held_out,
        first_tasks=first_tasks,
        common=common,
        search=search,
        trials=trials,
    )
    if on is not None and not isinstance(on, str):
        return run_sweep(out, plan, on, retry_failed, on_event)
    with executor_for_sweep(plan, out, on, workers) as executor:
        return run_sweep(out, plan, executor, retry_failed, on_event)


def grid_of(
    benchmark: str | Benchmark,
    learners: Iterable[str | lookup.LearnerKind] | Mapping[Any, Grid] | None = None,
) -> dict[str, Grid]:
    """Learner → setting → values: as given, or the benchmark's own for these learners."""
    if isinstance(learners, Mapping):
        return {lookup.learner_reference(learner): grid for learner, grid in learners.items()}
    where = lookup.benchmark_reference(benchmark)
    known = lookup.find_benchmark(where).grid
    if not known:
        raise ValueError(f"{lookup.shown(where)} has no grid: give learner → setting → values")
    if learners is None:
        learners = lookup.learners_of(where, known)
    names = {text: lookup.shown(text) for text in map(lookup.learner_reference, learners)}
    return {text: known[one_of("a learner in the grid", n, known)] for text, n in names.items()}


def run_sweep(
    folder: str | os.PathLike[str],
    sweep: Sweep | None = None,
    executor: Executor | None = None,
    retry_failed: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> Finished:
    """Make the runs that a sweep's folder lacks, choose settings, and run those on the test sets.

    It can be interrupted or killed at any time and called again, also by several processes at once.

    Parameters
    ----------
    folder
        The sweep's folder.
    sweep
        A new sweep, or values and seeds to extend the folder's sweep by; None to go on with it.
    executor
        Makes the runs; the default is one worker per core of this machine, or this process for a
        GPU.
    retry_failed
        Whether runs that failed before are run again.
    on_event
        Called with an `Event` after every run.
    """
    store = Store(folder)
    if sweep is not None:  # raise errors before the sweep is written to the folder
        _require_other_seeds(sweep, store)
        some = sweep.samples()
        check_settings(some, elsewhere=isinstance(executor, Elsewhere))
        if not store.exists():
            for experiment in {one.benchmark: one for one in some}.values():
                experiment.changed(device="cpu").continuum()  # raises if the data are wrong
    require_search(sweep or store.sweep())
    whole = store.sweep() if sweep is None else store.open(sweep)
    if executor is None:
        with executor_for_sweep(whole, folder) as usual:
            return run_sweep(folder, None, usual, retry_failed, on_event)
    if not isinstance(executor, Elsewhere):
        require_device(whole.device)
    phase = Phase(store, executor, retry_failed, on_event)
    failed = phase.make("selection", rounds(store, whole))
    choices = choose(store, tried_settings(store, whole), len(whole.seeds))
    final = whole.final((choice.benchmark, choice.learner, choice.settings) for choice in choices)
    failed |= phase.make("final", [Round(final)])
    made = [experiment for experiment in final if store.is_finished(experiment.key)]
    store.write_chosen(
        {
            "search": whole.search,
            "select": whole.select,
            "chosen_on": MODES[whole.select],
            "choices": [_described(choice, made) for choice in choices],
        }
    )
    runs = [store.run(experiment.key) for experiment in made]
    return Finished(choices, runs, list(failed.values()))


def _require_other_seeds(sweep: Sweep, store: Store) -> None:
    """Refuse to report seeds that settings are chosen with, unless the folder has them already."""
    known = store.sweep() if store.exists() else None
    whole, had = (sweep, set()) if known is None else (known.extended(sweep), known.used_twice)
    if used := whole.used_twice - had:
        raise ValueError(
            f"final_seeds must be others than the seeds to choose with, got {min(used)} in both"
        )


def check_settings(planned: Sequence[Experiment], elsewhere: bool = False) -> None:
    """Make a learner with each setting once, so that its constructor can refuse the setting.

    For runs that are made `elsewhere` it is made on the CPU: this machine may lack their device.
    """
    first = {
        (one.benchmark, one.learner, settings_key(one.settings)): one for one in reversed(planned)
    }
    for experiment in first.values():
        (experiment.changed(device="cpu") if elsewhere else experiment).new_learner()


def _described(choice: Choice, made: Sequence[Experiment]) -> dict[str, Any]:
    own = (choice.benchmark, choice.learner)
    described: dict[str, Any] = plain(asdict(choice))
    return described | {"runs": [e.key for e in made if (e.benchmark, e.learner) == own]}


class Phase:
    """Makes runs in a folder in which other processes may be making runs, too.

    `retry_failed` and `on_event` are those of `run_sweep`.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        retry_failed: bool = False,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.store, self.executor, self.retry_failed = store, executor, retry_failed
        self.on_event = on_event
        self.standings = Standings()

    def make(self, name: str, rounds: Iterable[Round]) -> dict[str, tuple[Experiment, str]]:
        """Return when all runs of all rounds are done; the failed ones by key."""
        self.name, self.done, self.clock = name, 0, TimeLeft()
        self.left: dict[str, Experiment] = {}
        self.failed: dict[str, tuple[Experiment, str]] = {}
        self.deaths: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        known: set[str] = set()  # a search may suggest the same settings twice
        for one in rounds:
            new = [experiment for experiment in one.experiments if experiment.key not in known]
            known |= {experiment.key for experiment in new}
            self._make_round(new, one.later)
        return self.failed

    def _make_round(self, planned: Sequence[Experiment], later: int) -> None:
        self.store.forget_failures(one.key for one in planned if self._is_tried_again(one))
        self.left = {experiment.key: experiment for experiment in planned}
        self.later = later
        self.clock.plan(planned, later)
        for experiment in list(self.left.values()):
            if self.store.is_done(experiment.key):
                self._count(experiment, self.store.outcome(experiment), now=False)
        self._report()
        unclaimed = list(self.left.values())
        # On a GPU a setting's seeds follow each other, so the data of all seeds are used again.
        gpu_seeds = {one.seed for one in planned if one.device.startswith("cuda")}
        compute = Compute(continuums=max(1, len(gpu_seeds)))
        while self.left:
            with closing(self._answers(compute, unclaimed)) as outcomes:
                for experiment, answer in outcomes:
                    outcome = self._outcome(experiment, answer)
                    if outcome is not None:
                        self._count(experiment, outcome, now=True)
                        self._report(experiment, outcome)
            unclaimed = self._wait_for_others()

    def _answers(
        self, compute: Compute, experiments: Sequence[Experiment]
    ) -> Generator[tuple[Experiment, Run | Failure | Died | None], None, None]:
        """Each run with its outcome; None if another process is making it."""
        if isinstance(self.executor, Elsewhere):
            return perform_elsewhere(self.store, self.executor, compute, experiments)
        return self.executor(Perform(self.store.path, compute), experiments)

    def _is_tried_again(self, experiment: Experiment) -> bool:
        """Whether a run that failed before is made again: if asked for, or if its worker died."""
        if not self.store.is_failed(experiment.key):
            return False
        outcome = self.store.outcome(experiment)
        lost = isinstance(outcome, Failure) and outcome.error.startswith(LostWorkerError.__name__)
        return self.retry_failed or lost

    def _wait_for_others(self) -> list[Experiment]:
        """Wait for runs that other processes are making; those that no process makes any more."""
        unclaimed: list[Experiment] = []
        while self.left and not unclaimed:
            time.sleep(POLL_SECONDS)
            for experiment in list(self.left.values()):
                if self.store.is_done(experiment.key):
                    outcome = self.store.outcome(experiment)
                    self._count(experiment, outcome, now=False)
                    self._report(experiment, outcome)
                elif not self.store.is_claimed(experiment.key):
                    unclaimed.append(experiment)
        return unclaimed

    def _count(self, experiment: Experiment, outcome: Run | Failure, now: bool) -> None:
        del self.left[experiment.key]
        self.done += 1
        result = outcome.result if isinstance(outcome, Run) else {}
        self.clock.add(experiment, result.get("seconds"), now)
        if self.name == "selection":
            self.standings.add(experiment, result.get("acc"))
        if isinstance(outcome, Failure):
            self.failed[experiment.key] = experiment, outcome.error

    def _report(
        self, experiment: Experiment | None = None, outcome: Run | Failure | None = None
    ) -> None:
        if self.on_event is not None:
            total = self.done + len(self.left) + self.later
            left, best = self.clock.left(), self.standings.best()
            self.on_event(Event(self.name, self.done, total, left, best, experiment, outcome))

    def _outcome(
        self, experiment: Experiment, answer: Run | Failure | Died | None
    ) -> Run | Failure | None:
        """A worker's answer; None if its run is another's, or is to be made again.

        A worker that died says nothing about the settings of its run, which goes on from its
        checkpoint in another worker. Only if several die of one run, it has failed.
        """
        if not isinstance(answer, Died):
            return answer
        dead = self.losses if answer.blameless else self.deaths
        dead[experiment.key] += 1
        if dead[experiment.key] < (LOSSES if answer.blameless else DEATHS):
            return None
        with self.store.claim(experiment.key) as mine:
            if not mine:
                return None
            if not self.store.is_done(experiment.key):
                self.store.fail(experiment, Failed.of(LostWorkerError(str(answer))))
            return self.store.outcome(experiment)
