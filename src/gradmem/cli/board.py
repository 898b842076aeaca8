"""`gradmem board`: every learner at several sizes of memory, with what learning cost."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gradmem.benchmarks.data_sets import DATA_SETS, OTHER, kind_of_data
from gradmem.board import (
    BENCHMARKS,
    ENTRIES,
    MEMORIES,
    Cell,
    Conditions,
    Kept,
    Searched,
    cells_of,
    keep,
    load,
    make_cells,
    write_board,
)
from gradmem.cli import options
from gradmem.cli.console import say
from gradmem.cli.sweep_display import say_failed, stoppable
from gradmem.evaluation.result_folder import check_folder
from gradmem.runs.read_folder import Run
from gradmem.sweeps import executor_on
from gradmem.validation import positive_int

__all__ = ["board_command"]

BenchmarksOption = Annotated[
    str | None,
    options.what(f"Of {', '.join(BENCHMARKS)}, with commas. (default: MNIST's; on a GPU: all)"),
]
MemoriesOption = Annotated[
    str | None,
    options.what(f"Of {', '.join(map(str, MEMORIES))}, with commas. (default: all)"),
]
LearnersOption = Annotated[
    str | None, options.what(f"Of {', '.join(ENTRIES)}, with commas. (default: all)")
]
SeedsOption = Annotated[
    int | None,
    options.what("Runs to report of each, from seed 1000 on. (default: 5; CIFAR-100: 3)"),
]
OutOption = Annotated[Path, options.where("Folder for runs, page and pictures.")]
KeepOption = Annotated[
    Path | None,
    options.where("Folder for small results, one file per row. (default: OUT/kept)", "--keep"),
]
FromOption = Annotated[
    Path | None,
    options.where("Run nothing: make the page from a folder of kept results.", "--from"),
]


@options.takes_stream("data", "tasks", "examples")
def board_command(
    stream: dict[str, Any],
    benchmarks: BenchmarksOption = None,
    memories: MemoriesOption = None,
    learners: LearnersOption = None,
    seeds: SeedsOption = None,
    out: OutOption = Path("board"),
    kept_in: KeepOption = None,
    source: FromOption = None,
    device: options.Device = None,
    workers: options.Workers = None,
    on: options.On = None,
    cpus: options.Cpus = None,
    gpus: options.Gpus = None,
    job: options.Job = None,
    retry_failed: options.RetryFailed = False,
) -> None:
    """Put learners side by side: ACC at the same memory, with the steps and gradients it took.

    Settings are chosen on held-out data, and reported with other seeds on the test sets.

    gradmem board --benchmarks mnist-rotations --memories 200    stopped or killed, it goes on

    gradmem board --keep results/board    what the folder has is not run again

    gradmem board --from results/board --out docs    the page alone

    Smaller than the board (--tasks, --examples, --data sample) it is a trial.
    """
    check_folder(out)
    if source is not None:
        typed: tuple[Any, ...] = (benchmarks, memories, learners, seeds, kept_in, device, workers)
        typed += (on, cpus, gpus, job)
        if retry_failed or stream or any(option is not None for option in typed):
            raise ValueError(
                "--from makes the whole page and runs nothing: only --out goes with it"
            )
        _write_page(source, out)
        return
    device = device or "cpu"
    if seeds is not None:
        positive_int("--seeds", seeds)
    names = _benchmarks(benchmarks, device)
    sizes = [str(m) for m in MEMORIES]
    sizes = sizes if memories is None else options.some_of("--memories", memories, sizes)
    who = list(ENTRIES)
    who = who if learners is None else options.some_of("learner", learners, who)
    cells = cells_of(names, map(int, sizes), who)
    if not cells:
        raise ValueError(f"the board has no {', '.join(who)} on {', '.join(names)}")
    conditions = Conditions(device=device, **options.absolute(stream))
    keep_in = kept_in or out / "kept"
    check_folder(keep_in, "--keep")
    kinds = {name: kind_of_data(name, conditions.data) for name in names}
    kept = [
        one
        for one in (load(keep_in) if keep_in.exists() else [])
        if (name := one.column.benchmark) in kinds and one.is_of(conditions.size(name), kinds[name])
    ]
    board = _Board(out, keep_in, conditions, seeds, _command(names, sizes, who, seeds, conditions))
    parameters = options.assignments("--job", job or [])
    with executor_on(on, out, device, workers, cpus, gpus, parameters) as executor:
        board.make(cells, kinds, kept, executor, retry_failed)
    _write_page(keep_in, out)


@dataclass(frozen=True)
class _Board:
    """Makes the runs in `out`, and writes small files with their results to `keep_in`."""

    out: Path
    keep_in: Path
    conditions: Conditions
    seeds: int | None
    command: str
    """What was typed."""

    def make(
        self,
        cells: Sequence[Cell],
        kinds: dict[str, str],
        kept: Sequence[Kept],
        executor: Any,
        retry_failed: bool,
    ) -> None:
        for name, kind in kinds.items():
            if kind == OTHER:
                say(f"{name}: other data than the papers', so that nothing is compared.")
        written: set[Path] = set()

        def finished(cell: Cell, searched: Searched | None, runs: list[Run]) -> None:
            kind = kinds[cell.column.benchmark]
            if path := keep(self.keep_in, cell, searched, runs, self.command, kind):
                written.add(path)

        with stoppable() as display:
            failed = make_cells(
                self.out,
                cells,
                self.conditions,
                executor,
                self.seeds,
                retry_failed,
                display,
                finished,
                kept,
            )
        say_failed(failed)
        if not written and not any(self.keep_in.glob("*.json")):
            raise FloatingPointError("no run finished")


def _write_page(source: Path, out: Path) -> None:
    say("Written:")
    for path in write_board(source, out):
        say(f"  {path}")


def _benchmarks(text: str | None, device: str) -> list[str]:
    if text is None:
        # On a CPU, ResNets take days.
        cuda = device.startswith("cuda")
        return [name for name in BENCHMARKS if cuda or DATA_SETS[name] == "mnist"]
    return options.some_of("benchmark", text, BENCHMARKS)


def _command(
    names: list[str],
    sizes: list[str],
    learners: list[str],
    seeds: int | None,
    conditions: Conditions,
) -> str:
    """The command that repeats these runs, without the folders of data and results."""
    words = ["gradmem board"]
    if names != _benchmarks(None, conditions.device):
        words.append(f"--benchmarks {','.join(names)}")
    if len(sizes) < len(MEMORIES):
        words.append(f"--memories {','.join(sizes)}")
    if len(learners) < len(ENTRIES):
        words.append(f"--learners {shlex.quote(','.join(learners))}")
    typed = {
        "--seeds": seeds,
        "--tasks": conditions.n_tasks,
        "--examples": conditions.examples_per_task,
        "--device": conditions.device,
        "--data": conditions.data,
    }
    return options.repeated(words, typed)
