"""`gradmem sweep`: try settings, choose the best on held-out data, and run those."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradmem.benchmarks import lookup
from gradmem.cli import options
from gradmem.cli.console import console, say
from gradmem.cli.report import write_report
from gradmem.cli.sweep_display import SweepDisplay, choices_table
from gradmem.evaluation.result_folder import check_folder
from gradmem.files import read_json
from gradmem.sweeps import (
    MODES,
    SEARCHES,
    Finished,
    Store,
    Sweep,
    executor_for_sweep,
    grid_of,
    run_sweep,
)
from gradmem.sweeps.plan import FIRST_FINAL_SEED, Grid, check_grids, final_numbers
from gradmem.validation import one_of, positive_int

__all__ = ["sweep_command"]

FolderArgument = Annotated[Path | None, typer.Argument(help="A sweep's folder, to go on with it.")]
BenchmarksOption = Annotated[
    str | None, options.what(f"{', '.join(lookup.BENCHMARKS)}, {options.OWN}; several with commas.")
]
GridOption = Annotated[
    str | None,
    options.what(
        'A JSON file: {"gem": {"lr": [0.03, 0.1]}}. (default: the benchmark\'s own; of gradmem\'s '
        "the paper's, Appendix A)"
    ),
]
SearchOption = Annotated[
    str | None,
    options.what(
        "Which settings are tried. "
        + "; ".join(f"{name}: {meaning}" for name, meaning in SEARCHES.items())
        + '. (default: grid; optuna needs "gradmem\\[optuna]")'
    ),
]
TrialsOption = Annotated[
    int | None, options.what("For --search optuna: settings to try of each learner. (default: 50)")
]
SeedsOption = Annotated[
    int | None, options.what("How many to choose with, from 0 on. (default: 3)")
]
SelectOption = Annotated[
    str | None,
    options.what(
        "What settings are chosen on. "
        + "; ".join(f"{name}: {meaning}" for name, meaning in MODES.items())
        + ". (default: validation)"
    ),
]
FinalSeedsOption = Annotated[
    int | None,
    options.what(
        "How many to run the chosen settings with, other ones: from "
        f"{FIRST_FINAL_SEED} on. (default: as --seeds)"
    ),
]
HeldOutOption = Annotated[
    float | None, options.what("Part of each training set to choose on. (default: 0.1)")
]
FirstTasksOption = Annotated[
    int | None, options.what("For --select first-tasks: how many. (default: 3)")
]


@options.takes_stream()
def sweep_command(
    stream: dict[str, Any],
    folder: FolderArgument = None,
    benchmark: BenchmarksOption = None,
    learners: options.Learners = None,
    grid: GridOption = None,
    assigned: options.Set = None,
    search: SearchOption = None,
    trials: TrialsOption = None,
    seeds: SeedsOption = None,
    select: SelectOption = None,
    final_seeds: FinalSeedsOption = None,
    held_out: HeldOutOption = None,
    first_tasks: FirstTasksOption = None,
    out: options.Out = None,
    device: options.Device = None,
    workers: options.Workers = None,
    on: options.On = None,
    cpus: options.Cpus = None,
    gpus: options.Gpus = None,
    job: options.Job = None,
    retry_failed: options.RetryFailed = False,
) -> None:
    """Try settings of a grid, choose the best, and report those on the test sets.

    gradmem sweep --benchmark mnist-rotations --learners single,gem --data sample --out my-sweep

    gradmem sweep my-sweep    goes on where it was stopped; several may work in one folder.
    With parts of your own, give the whole command again: a file makes no code run.
    """
    if folder is not None and out is not None and folder != out:
        raise ValueError(f"a sweep has one folder, got {folder} and --out {out}")
    where = folder or out
    if where is not None:
        check_folder(where)
    typed: dict[str, Any] = {"seeds": seeds, "select": select, "final_seeds": final_seeds}
    typed |= {"held_out": held_out, "first_tasks": first_tasks, "search": search, "trials": trials}
    asked = {name: value for name, value in typed.items() if value is not None}
    common = stream if device is None else {**stream, "device": device}
    place: dict[str, Any] = {"on": on, "workers": workers, "cpus": cpus, "gpus": gpus}
    place["parameters"] = options.assignments("--job", job or [])
    if benchmark is None:
        if where is None:
            raise ValueError("--benchmark for a new sweep, or the FOLDER of one to go on with")
        if asked or common or learners or grid or assigned:
            raise ValueError(
                "a sweep is extended by giving all its options: --benchmark is missing"
            )
        _run(where, None, place, retry_failed)
        return
    names = options.names_in(benchmark)
    where = where or Path(
        "sweeps", "-".join(lookup.shown(lookup.benchmark_reference(name)) for name in names)
    )
    grids = {}
    for name in names:
        grids[name], more = _grid(name, grid, learners, assigned or [])
        common = {**common, **more}
    store = Store(where)
    if not store.exists() or store.sweep().common.get("data") != common.get("data"):
        common = options.absolute(common)
    _run(where, Sweep(grids, common=common, **_numbers(**asked)), place, retry_failed)


def _run(where: Path, plan: Sweep | None, place: dict[str, Any], retry_failed: bool) -> None:
    with SweepDisplay() as display:
        try:
            with executor_for_sweep(plan or Store(where).sweep(), where, **place) as executor:
                done = run_sweep(where, plan, executor, retry_failed, display)
        except KeyboardInterrupt:
            display.stop()
            short = Store(where).exists() and not (plan and plan.others)
            there = f" --on {place['on']}" if place["on"] else ""
            again = f"`gradmem sweep {where}{there}`" if short else "The same command"
            say(f"Stopped after {display.done} runs, which are kept. {again} goes on.")
            raise typer.Exit(130) from None
    _report(done, where)


def _report(done: Finished, where: Path) -> None:
    if done.failed:
        n = len(done.failed)
        say("1 run failed:" if n == 1 else f"{n} runs failed:")
        for experiment, error in done.failed[:5]:
            say(f"  {experiment.key}: {error}")
        if n > 5:
            say(f"  and {n - 5} more (failure.json)")
        say("Settings that failed are not chosen. --retry-failed tries them again.")
    if not done.runs:
        raise FloatingPointError("no setting finished with all seeds")
    console.print(choices_table(done.choices, "chosen"))
    write_report([run.folder for run in done.runs], where)
    say(f"  {where / 'chosen.json'}")


def _numbers(
    seeds: int = 3,
    select: str = "validation",
    final_seeds: int | None = None,
    held_out: float | None = None,
    first_tasks: int | None = None,
    search: str = "grid",
    trials: int | None = None,
) -> dict[str, Any]:
    """The fields of `Sweep` that say how settings are chosen."""
    n = positive_int("--seeds", seeds)
    final = n if final_seeds is None else positive_int("--final-seeds", final_seeds)
    if first_tasks is not None and select != "first-tasks":
        raise ValueError("--first-tasks goes with --select first-tasks")
    if trials is not None and search != "optuna":
        raise ValueError("--trials goes with --search optuna")
    if held_out is not None and select == "test-as-published":
        raise ValueError("--held-out does not go with --select test-as-published")
    found = {
        "seeds": tuple(range(n)),
        "select": select,
        "final_seeds": final_numbers(select, final),
        "held_out": held_out,
        "first_tasks": first_tasks,
        "search": search,
        "trials": trials,
    }
    return {name: value for name, value in found.items() if value is not None}


def _grid(
    benchmark: str,
    file: str | None,
    learners: str | None,
    assigned: list[str],
) -> tuple[dict[str, Grid], dict[str, Any]]:
    """Learner → setting → values, and what else the benchmark is asked for.

    A setting that is typed has one value to try.
    """
    chosen = None if learners is None else options.names_in(learners)
    if file is None or file == "paper":
        found = grid_of(benchmark, chosen)
    else:
        found = _read_grid(file, benchmark, chosen)
    settings, stream = options.read_settings(benchmark, found, assigned)
    names_of = lookup.short_names(map(lookup.learner_reference, found))
    fixed = {
        learner: {name: [value] for name, value in settings[names_of[learner]].items()}
        for learner in found
    }
    return {learner: {**found[learner], **fixed[learner]} for learner in found}, stream


def _read_grid(file: str, benchmark: str, chosen: list[str] | None) -> dict[str, Grid]:
    """The grids in a JSON file of the learners that are chosen; of all if None are."""
    if not Path(file).is_file():
        raise ValueError(f'--grid must be "paper" or a JSON file, got {file!r}')
    try:
        known = read_json(Path(file), "it")
        others = [name for name in known if not lookup.is_given(name)]
        if chosen is None and others:
            raise ValueError(
                f"it names {others[0]!r:.100}, which is not gradmem's. Code that a file names is "
                "run only if you name it, too: --learners"
            )
        names = list(known) if chosen is None else chosen
        found = {name: known[one_of("a learner in the grid", name, known)] for name in names}
        (checked,) = check_grids({benchmark: grid_of(benchmark, found)}).values()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no grid: {error!s:.1000}") from error
    return {**checked}
