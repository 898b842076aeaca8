"""`gradmem paper`: run the paper's experiments, and compare with its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gradmem.benchmarks.data_sets import DATA_SETS, OTHER, kind_of_data
from gradmem.cli import options
from gradmem.cli.console import say
from gradmem.cli.sweep_display import SweepDisplay, say_failed, stoppable
from gradmem.evaluation.result_folder import check_folder
from gradmem.reproduction.compare import compare
from gradmem.reproduction.kept import keep, load
from gradmem.reproduction.numbers import numbers
from gradmem.reproduction.page import summary, write_reproduction
from gradmem.reproduction.plan import (
    BENCHMARKS,
    LEARNERS,
    PARTS,
    Conditions,
    Setting,
    settings_of,
)
from gradmem.reproduction.runs import Timed, default_workers, make_runs
from gradmem.reproduction.search import keep_search, load_searches, search
from gradmem.sweeps import Executor, executor_on
from gradmem.validation import one_of, positive_int

__all__ = ["paper_command"]

PartsArgument = Annotated[
    list[str] | None, typer.Argument(help=f"all (default), or {', '.join(PARTS)}.")
]
BenchmarksOption = Annotated[
    str | None,
    options.what(f"Of {', '.join(BENCHMARKS)}, with commas. (default: MNIST's; on a GPU: all)"),
]
LearnersOption = Annotated[
    str | None, options.what(f"Of {', '.join(LEARNERS)}, with commas. (default: all)")
]
SeedsOption = Annotated[int | None, options.what("Per setting, from 0 on. (default: 5)")]
GridOption = Annotated[bool, options.what("Also search the paper's grids.", "--grid")]
PrecisionOption = Annotated[str | None, options.what("GEM's gradients on a GPU: tf32 or bf16.")]
OutOption = Annotated[Path, options.where("Folder for runs, page and pictures.")]
KeepOption = Annotated[
    Path | None,
    options.where("Folder for small results, one file per setting. (default: OUT/kept)", "--keep"),
]
FromOption = Annotated[
    Path | None,
    options.where("Run nothing: make the page from a folder of kept results.", "--from"),
]


@options.takes_stream("data", "tasks", "examples")
def paper_command(
    stream: dict[str, Any],
    parts: PartsArgument = None,
    benchmarks: BenchmarksOption = None,
    learners: LearnersOption = None,
    seeds: SeedsOption = None,
    grid: GridOption = False,
    precision: PrecisionOption = None,
    out: OutOption = Path("paper"),
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
    """Run the paper again: Figure 1, Tables 1 to 3, Appendix B, each number beside its own.

    gradmem paper table-3 --seeds 5    one part; stopped or killed, the same command goes on

    gradmem paper --from results/paper --out docs    the page alone

    Smaller than the paper (--tasks, --examples, --data sample) it is a trial: nothing is compared.
    """
    check_folder(out)
    if source is not None:
        typed: tuple[Any, ...] = (parts, benchmarks, learners, seeds, precision, kept_in)
        typed += (device, workers, on, cpus, gpus, job)
        if grid or retry_failed or stream or any(option is not None for option in typed):
            raise ValueError(
                "--from makes the whole page and runs nothing: only --out goes with it"
            )
        _write_page(source, out)
        return
    device, seeds = device or "cpu", 5 if seeds is None else positive_int("--seeds", seeds)
    if grid and learners is not None:
        raise ValueError("--grid is for all learners; for some: gradmem sweep --learners …")
    chosen = _parts(parts or ["all"])
    names = _benchmarks(benchmarks, device)
    who = list(LEARNERS) if learners is None else options.some_of("learner", learners, LEARNERS)
    conditions = Conditions(device=device, precision=precision, **options.absolute(stream))
    settings = settings_of(chosen, names, who)
    if not settings:
        of = f" of {', '.join(who)}" if learners else ""
        raise ValueError(f"{', '.join(chosen)} has nothing{of} on {', '.join(names)}")
    command = _command(chosen, names, who, seeds, conditions, grid)
    keep_in = kept_in or out / "kept"
    check_folder(keep_in, "--keep")
    if keep_in.exists():
        load(keep_in)  # raises an error if a file is damaged, before anything is run
        load_searches(keep_in)
    kinds = {name: kind_of_data(name, conditions.data) for name in names}
    if workers is None and on in (None, "here"):
        workers = default_workers(conditions)
    parameters = options.assignments("--job", job or [])
    with executor_on(on, out, device, workers, cpus, gpus, parameters) as executor:
        paper = _Paper(out, keep_in, conditions, seeds, command, executor, retry_failed, kinds)
        paper.make(settings, grid)
    _write_page(keep_in, out)


@dataclass(frozen=True)
class _Paper:
    """Makes the runs in `out`, and writes small files with their results to `keep_in`."""

    out: Path
    keep_in: Path
    conditions: Conditions
    seeds: int
    command: str
    """What was typed."""
    executor: Executor
    retry_failed: bool
    kinds: dict[str, str]
    """Benchmark → what its data are; see `kind_of_data`."""

    def make(self, settings: list[Setting], grid: bool) -> None:
        """Make all runs and, if asked, search the grids."""
        for name, kind in self.kinds.items():
            if kind == OTHER:
                say(f"{name}: other data than the paper's, so that nothing is compared.")
        with stoppable() as display:
            runs, failed = self._run(settings, display)
            for name in self.kinds if grid else ():
                self._search(name, display)
        say_failed(failed)
        if not runs:
            raise FloatingPointError("no run finished")

    def _run(self, settings: list[Setting], display: SweepDisplay) -> tuple[Any, Any]:
        runs, failed = make_runs(
            self.out,
            settings,
            range(self.seeds),
            self.conditions,
            self.executor,
            self.retry_failed,
            on_event=display,
            on_finished=self._keep,
        )
        for setting, found in runs.items():
            if self._keep(setting, found) is None:
                say(
                    f"{self.keep_in}: {setting.slug} stays as it is: it has more seeds, or is no "
                    "trial."
                )
        return runs, failed

    def _keep(self, setting: Setting, runs: Timed) -> Path | None:
        return keep(self.keep_in, setting, runs, self.command, self.kinds[setting.benchmark])

    def _search(self, name: str, display: SweepDisplay) -> None:
        done = search(
            self.out, name, self.conditions, self.seeds, self.executor, self.retry_failed, display
        )
        of_kind = replace(self.conditions, data=self.kinds[name])
        keep_search(self.keep_in, name, done, of_kind, self.command)


def _write_page(source: Path, out: Path) -> None:
    written = write_reproduction(source, out)
    say(summary(compare(numbers(), load(source))).replace("**", ""))
    say("Written:")
    for path in written:
        say(f"  {path}")


def _parts(names: list[str]) -> list[str]:
    asked = [one_of("a part", name, ("all", *PARTS)) for name in names]
    return list(PARTS) if "all" in asked else [part for part in PARTS if part in asked]


def _benchmarks(text: str | None, device: str) -> list[str]:
    if text is None:
        # On a CPU, ResNets take days.
        cuda = device.startswith("cuda")
        return [name for name in BENCHMARKS if cuda or DATA_SETS[name] == "mnist"]
    return options.some_of("benchmark", text, BENCHMARKS)


def _command(
    parts: list[str],
    names: list[str],
    learners: list[str],
    seeds: int,
    conditions: Conditions,
    grid: bool,
) -> str:
    """The command that repeats these runs, without the folders of data and results."""
    words = ["gradmem paper", *([] if len(parts) == len(PARTS) else parts)]
    if names != _benchmarks(None, conditions.device):
        words.append(f"--benchmarks {','.join(names)}")
    if len(learners) < len(LEARNERS):
        words.append(f"--learners {','.join(learners)}")
    typed = {
        "--seeds": seeds,
        "--tasks": conditions.n_tasks,
        "--examples": conditions.examples_per_task,
        "--precision": conditions.precision,
        "--device": conditions.device,
        "--data": conditions.data,
    }
    return options.repeated(words, typed) + " --grid" * grid
