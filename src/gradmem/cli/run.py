"""`gradmem run` and `gradmem compare`: one learner, or several over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from gradmem.benchmarks import lookup
from gradmem.cli import options
from gradmem.cli.console import console, say
from gradmem.cli.progress import Display
from gradmem.cli.report import write_report
from gradmem.reports import summarize, terminal_table
from gradmem.runs.compare import default_learners, finished_run, plan_runs, run_into
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import Run
from gradmem.runs.tensorboard import TensorBoardLog
from gradmem.runs.write_folder import RunFolder
from gradmem.streams.continuum import IID
from gradmem.validation import positive_int

__all__ = ["compare_command", "run_command"]


@options.takes_stream()
def run_command(
    ctx: typer.Context,
    benchmark: options.Benchmark,
    learner: options.Learner,
    stream: dict[str, Any],
    assigned: options.Set = None,
    seed: options.Seed = 0,
    shuffled: options.Shuffled = False,
    every: options.Every = None,
    out: options.Out = None,
    save_every: options.SaveEvery = None,
    overwrite: options.Overwrite = False,
    device: options.Device = None,
    tensorboard: options.TensorBoard = None,
) -> None:
    """Train one learner on one benchmark and write its folder, runs/BENCHMARK/LEARNER-seedN.

    gradmem run --benchmark mnist-rotations --learner gem --data sample --out my-run

    gradmem run --benchmark my_module:digits --learner my_module:MyLearner --lr 0.1
    """
    own = options.of_command(ctx)
    settings, more = options.read_settings(benchmark, [learner], assigned or (), ctx.args, own)
    common = {"shuffled": shuffled, "every": every, "device": device or "cpu", **stream, **more}
    experiment = Experiment(benchmark, learner, *settings.values(), seed=seed, **common)
    folder = out or _default_folder(experiment) / f"{experiment.name}-seed{seed}"
    there = not overwrite and finished_run(folder, experiment)
    with Display() as display:
        run = _make(folder, experiment, display, overwrite, tensorboard, save_every)
    console.print(terminal_table(summarize([run])))
    say(f"{'Already there' if there else 'Written'}: {folder / 'result.json'}")


@options.takes_stream()
def compare_command(
    ctx: typer.Context,
    benchmark: options.Benchmark,
    stream: dict[str, Any],
    learners: options.Learners = None,
    assigned: options.Set = None,
    seeds: Annotated[int, options.what("How many seeds each, from --seed on.")] = 1,
    seed: options.Seed = 0,
    shuffled: options.Shuffled = False,
    every: options.Every = None,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    device: options.Device = None,
    tensorboard: options.TensorBoard = None,
) -> None:
    """Run several learners: one page, one table, pictures, in runs/BENCHMARK.

    gradmem compare --benchmark mnist-rotations --data sample --learners single,ewc,gem

    Runs that are finished in the folder are not made again.
    """
    numbers = range(seed, seed + positive_int("--seeds", seeds))
    where = lookup.benchmark_reference(benchmark)
    chosen = default_learners(where) if learners is None else options.names_in(learners)
    own = options.of_command(ctx)
    settings, more = options.read_settings(benchmark, chosen, assigned or (), ctx.args, own)
    common = {"shuffled": shuffled, "every": every, "device": device or "cpu", **stream, **more}
    planned = plan_runs(benchmark, chosen, numbers, settings, **common)
    root = out or _default_folder(next(iter(planned.values())))
    write_report(_make_all(root, planned, overwrite, tensorboard), root)


def _make_all(
    root: Path, planned: Mapping[str, Experiment], overwrite: bool, tensorboard: Path | None
) -> list[Path]:
    """Make all runs; the folders of those that finished."""
    for name, experiment in planned.items():
        RunFolder(root / name, experiment).check(overwrite)  # before the first of them is run
    finished = []
    with Display() as display:
        for name, experiment in planned.items():
            try:
                _make(root / name, experiment, display, overwrite, tensorboard)
            except FloatingPointError as error:
                display.fail(str(error))  # the other learners are run all the same
            else:
                finished.append(root / name)
    if not finished:
        raise FloatingPointError("no learner finished")
    return finished


def _make(
    folder: Path,
    experiment: Experiment,
    display: Display,
    overwrite: bool,
    tensorboard: Path | None = None,
    save_every: int | None = None,
) -> Run:
    """Make a run and show its progress; if it is finished in the folder, read it."""
    name = f"{experiment.name}, seed {experiment.seed}"
    display.start(f"{name}, {IID}" if experiment.shuffled else name)
    if not overwrite and (known := finished_run(folder, experiment)):
        display.finish(f"finished before, in {folder}: --overwrite computes it again")
        return known
    with ExitStack() as stack:
        callbacks: list[Any] = [display]
        if tensorboard is not None:
            log = TensorBoardLog(tensorboard / lookup.shown(experiment.benchmark) / folder.name)
            callbacks.append(stack.enter_context(log))
        try:
            return run_into(folder, experiment, callbacks, overwrite, save_every)
        except SystemExit:  # by SIGTERM, which the checkpoint has told
            display.stop()
            raise
        except KeyboardInterrupt:
            display.stop()
            rows = folder / "partial.json"
            so_far = f" The tasks finished so far are in {rows}." if rows.exists() else ""
            saved = (folder / "checkpoint").exists()
            then = " and saved: the same command goes on" if saved else ""
            say(f"Stopped{then}.{so_far}")
            raise


def _default_folder(experiment: Experiment) -> Path:
    return Path("runs", lookup.shown(experiment.benchmark))
