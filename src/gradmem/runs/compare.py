"""Several learners on one benchmark, over seeds."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.benchmarks import lookup
from gradmem.benchmarks.benchmark import Benchmark
from gradmem.evaluation import Result
from gradmem.evaluation.checkpointing import RunCheckpoint
from gradmem.files import plain
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import COUNTS, Run, read_run
from gradmem.runs.write_folder import RunFolder
from gradmem.validation import one_of, positive_int

__all__ = ["compare", "default_learners", "finished_run", "plan_runs", "run_into", "seed_numbers"]


def compare(
    benchmark: str | Benchmark,
    learners: Iterable[str | lookup.LearnerKind] | None = None,
    seeds: int | Sequence[int] = 1,
    out: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Any] = (),
    **common: Any,
) -> dict[str, list[Result]]:
    """Run learners on a benchmark, each with the same seeds: learner → a result per seed.

    A run that diverges is left out, with a warning.

    Parameters
    ----------
    benchmark
        Its name, `module:name`, or the record itself.
    learners
        Their names, `module:name`, or classes. If left out: all that the benchmark has settings
        for.
    seeds
        How many, from 0 on, or which.
    out
        A folder for the runs, out/LEARNER-seedN, from which `gradmem.report` makes a page. Runs
        that are finished there are read, not made again. If left out, nothing is written.
    settings
        Learner → settings in place of the benchmark's.
    overwrite
        Whether runs in `out` are made again and other experiments' are replaced.
    callbacks
        Of every run; see `gradmem.run`.
    common
        What all runs have in common: what the benchmark takes (n_tasks, data, …), device, every.

    Examples
    --------
    >>> import gradmem as gm
    >>> results = gm.compare("mnist-rotations", ["single", gm.GEM], seeds=2, data="sample",
    ...                      n_tasks=2, examples_per_task=50, settings={"gem": {"memories": 20}})
    >>> {name: len(runs) for name, runs in results.items()}
    {'single': 2, 'gem': 2}
    """
    planned = plan_runs(benchmark, learners, seed_numbers(seeds), settings, **common)
    if out is not None:
        for name, experiment in planned.items():
            RunFolder(Path(out, name), experiment).check(overwrite)
    results: dict[str, list[Result]] = {}
    for name, experiment in planned.items():
        found = results.setdefault(name.rpartition("-seed")[0], [])
        try:
            if out is None:
                found.append(experiment.run(callbacks))
            else:
                found.append(_result(run_into(Path(out, name), experiment, callbacks, overwrite)))
        except FloatingPointError as error:
            warnings.warn(f"{name} is left out: {error}", stacklevel=2)
    return results


def plan_runs(
    benchmark: str | Benchmark,
    learners: Iterable[str | lookup.LearnerKind] | None,
    seeds: Sequence[int],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    **common: Any,
) -> dict[str, Experiment]:
    """The runs of a comparison: the name of each one's folder → the experiment."""
    where = lookup.benchmark_reference(benchmark)
    who = default_learners(where) if learners is None else map(lookup.learner_reference, learners)
    names = lookup.short_names(who)
    for name in settings or {}:
        one_of("a learner with settings", name, names.values())
    return {
        f"{name}-seed{seed}": Experiment(
            where, learner, (settings or {}).get(name), seed=seed, **common
        )
        for seed in seeds
        for learner, name in names.items()
    }


def default_learners(benchmark: str) -> list[str]:
    """References of the learners that a benchmark has settings for."""
    found = list(lookup.find_benchmark(benchmark).settings)
    if not found:
        name = lookup.shown(benchmark)
        raise ValueError(f"{name} has settings for no learner: say which to compare")
    return lookup.learners_of(benchmark, found)


def run_into(
    folder: Path,
    experiment: Experiment,
    callbacks: Sequence[Any] = (),
    overwrite: bool = False,
    save_every: int | None = None,
) -> Run:
    """Make a run in its folder, unless it is finished there; go on with one that was stopped.

    It is saved after every task, and every `save_every` examples, until its result is there.
    """
    target = RunFolder(folder, experiment)
    target.check(overwrite)
    if not overwrite and (known := finished_run(folder, experiment)):
        return known
    # Wrong settings or data raise an error here, before a folder is made.
    learner, continuum = experiment.new_learner(), experiment.continuum()
    checkpoint = RunCheckpoint(target.path / "checkpoint", save_every)
    with target.alone():
        if overwrite:
            checkpoint.clear()
        target.open(overwrite)
        run = target.save(experiment.run([*callbacks, target], learner, continuum, checkpoint))
        checkpoint.clear()
    return run


def finished_run(folder: Path, experiment: Experiment) -> Run | None:
    """The result of this experiment in a folder, if it is there."""
    try:
        known = read_run(folder)
    except ValueError:
        return None
    return known if known.config == plain(experiment.config()) else None


def seed_numbers(seeds: int | Sequence[int]) -> list[int]:
    """The seeds 0, 1, … for a number of seeds, else those given."""
    return list(range(positive_int("seeds", seeds)) if isinstance(seeds, int) else seeds)


def _result(run: Run) -> Result:
    known = run.result
    return Result(
        R=run.R,
        baseline=np.array(known["baseline"]),
        curve_examples=known["curves"]["examples"],
        curves=np.array(known["curves"]["accuracy"]),
        learned=known["learned"],
        labels=known["tasks"],
        seconds_training=known["seconds_training"],
        seconds_evaluation=known["seconds_evaluation"],
        statistics={name: known[name] for name in (*COUNTS, "examples") if name in known},
        score=run.score,
        config=run.config,
    )
