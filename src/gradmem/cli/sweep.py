"""`gradmem sweep`: try settings, choose the best honestly, and run those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradmem.benchmarks import BENCHMARKS
from gradmem.cli.options import (
    STREAM,
    WHAT,
    WHERE,
    DataOption,
    DeviceOption,
    ExamplesOption,
    RetryFailedOption,
    TasksOption,
    lasting,
    names_in,
    say,
)
from gradmem.cli.sweep_display import SweepDisplay, choices_table
from gradmem.published import grids
from gradmem.reports import draw_pictures, markdown_table, summarize, terminal_table
from gradmem.runs.folder import check_folder, write_whole
from gradmem.runs.machine import cores
from gradmem.sweeps import MODES, Executor, Finished, InTurn, Processes, Store, Sweep, run_sweep
from gradmem.sweeps.plan import FIRST_FINAL_SEED
from gradmem.validation import one_of, positive_int

__all__ = ["sweep"]

console = Console()


def sweep(
    folder: Annotated[
        Path | None, typer.Argument(help="A sweep's folder, to go on with it.")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            help=f"One or more of {', '.join(BENCHMARKS)}, with commas.", rich_help_panel=WHAT
        ),
    ] = None,
    learners: Annotated[
        str | None,
        typer.Option(help="Names with commas. (default: all in the grid)", rich_help_panel=WHAT),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help='A JSON file: {"gem": {"lr": [0.03, 0.1]}}. (default: "paper", its Appendix A)',
            rich_help_panel=WHAT,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="How many to choose with, from 0 on. (default: 3)", rich_help_panel=WHAT),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            help="What settings are chosen on. "
            + "; ".join(f"{name}: {what}" for name, what in MODES.items())
            + ". (default: validation)",
            rich_help_panel=WHAT,
        ),
    ] = None,
    final_seeds: Annotated[
        int | None,
        typer.Option(
            help="How many to run the chosen settings with, other ones: from "
            f"{FIRST_FINAL_SEED} on. (default: as --seeds)",
            rich_help_panel=WHAT,
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            help="Part of each training set to choose on. (default: 0.1)", rich_help_panel=WHAT
        ),
    ] = None,
    first_tasks: Annotated[
        int | None,
        typer.Option(help="For --select first-tasks: how many. (default: 3)", rich_help_panel=WHAT),
    ] = None,
    data: DataOption = None,
    tasks: TasksOption = None,
    examples: ExamplesOption = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples per step.", rich_help_panel=STREAM)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over each task.", rich_help_panel=STREAM)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder; one that holds a sweep is extended. (default: sweeps/BENCHMARK)",
            rich_help_panel=WHERE,
        ),
    ] = None,
    device: DeviceOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that run at a time. (default: one per core; on a GPU: 1)",
            rich_help_panel=WHERE,
        ),
    ] = None,
    retry_failed: RetryFailedOption = False,
) -> None:
    """Try all settings of a grid, choose the best, and report those on the test sets.

    gradmem sweep --benchmark mnist-rotations --learners single,gem --data sample --out my-sweep

    gradmem sweep my-sweep    goes on where it was stopped; several may work in one folder
    """
    if folder is not None and out is not None and folder != out:
        raise ValueError(f"a sweep has one folder, got {folder} and --out {out}")
    where = folder or out
    if where is not None:
        check_folder(where)
    if first_tasks is not None and select != "first-tasks":
        raise ValueError("--first-tasks goes with --select first-tasks")
    if held_out is not None and select == "test-as-published":
        raise ValueError("--held-out does not go with --select test-as-published")
    common = {
        "data": data if where and _data_of(where) == data else lasting(data),
        "n_tasks": tasks,
        "examples_per_task": examples,
        "batch_size": batch_size,
        "epochs": epochs,
        "device": device,
    }
    asked = {name: value for name, value in common.items() if value is not None}
    plan = None
    whole = (learners, grid, seeds, select, final_seeds, held_out, first_tasks)
    if benchmark is not None:
        names = names_in(benchmark)
        mode = "validation" if select is None else select
        n = 3 if seeds is None else positive_int("--seeds", seeds)
        plan = Sweep(
            grids={name: _grid(grid or "paper", name, learners) for name in names},
            seeds=tuple(range(n)),
            select=mode,
            final_seeds=_final_seeds(
                mode, n if final_seeds is None else positive_int("--final-seeds", final_seeds)
            ),
            held_out=0.1 if held_out is None else held_out,
            first_tasks=3 if first_tasks is None else first_tasks,
            common=asked,
        )
        where = where or Path("sweeps", "-".join(names))
    elif where is None:
        raise ValueError("--benchmark for a new sweep, or the FOLDER of one to go on with")
    elif asked or any(option is not None for option in whole):
        raise ValueError("a sweep is extended by giving all its options: --benchmark is missing")
    with SweepDisplay(console) as display:
        try:
            done = run_sweep(where, plan, _executor(workers, where, plan), retry_failed, display)
        except KeyboardInterrupt:
            display.stop()
            again = f"`gradmem sweep {where}`" if Store(where).exists() else "The same command"
            say(console, f"Stopped after {display.done} runs, which are kept. {again} goes on.")
            raise typer.Exit(130) from None
    _report(done, where)


def _report(done: Finished, where: Path) -> None:
    if done.failed:
        n = len(done.failed)
        say(console, "1 run failed:" if n == 1 else f"{n} runs failed:")
        for run, error in done.failed[:5]:
            say(console, f"  {run.key}: {error}")
        if n > 5:
            say(console, f"  and {n - 5} more (failure.json)")
        say(console, "Settings that failed are not chosen. --retry-failed tries them again.")
    if not done.runs:
        raise FloatingPointError("no setting finished with all seeds")
    rows = summarize(done.runs)
    folder = where / "report"
    folder.mkdir(exist_ok=True)
    table = folder / "table.md"
    write_whole(table, markdown_table(rows))
    draw_pictures(rows, folder)
    console.print(choices_table(done.choices, "chosen"))
    console.print(terminal_table(rows))
    for path in (where / "chosen.json", table):
        say(console, f"Written: {path}")


def _executor(workers: int | None, where: Path, plan: Sweep | None) -> Executor:
    device = (plan or Store(where).sweep()).device
    if workers is None:
        workers = 1 if device.startswith("cuda") else cores()
    return InTurn() if workers == 1 else Processes(workers)


def _data_of(folder: Path) -> str | None:
    """The data of the sweep in a folder, if there is one."""
    store = Store(folder)
    return store.sweep().common.get("data") if store.exists() else None


def _final_seeds(select: str, n: int) -> tuple[int, ...]:
    # As published: what was chosen is what is reported.
    first = 0 if select == "test-as-published" else FIRST_FINAL_SEED
    return tuple(range(first, first + n))


def _grid(grid: str, benchmark: str, learners: str | None) -> dict[str, Any]:
    if grid == "paper":
        known = grids()[one_of("a benchmark with a grid in the paper", benchmark, grids())]
    else:
        try:
            known = json.loads(Path(grid).read_text())
        except FileNotFoundError:
            raise ValueError(f'--grid must be "paper" or a JSON file, got {grid!r}') from None
        except ValueError as error:
            raise ValueError(f"{grid} is no JSON: {error}") from None
        if not isinstance(known, dict):
            raise ValueError(f'{grid} must hold {{"learner": {{"setting": [values]}}}}')
    if learners is None:
        return known
    return {
        name: known[one_of("a learner in the grid", name, known)] for name in names_in(learners)
    }
