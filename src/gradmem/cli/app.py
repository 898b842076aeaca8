"""What can be typed after `gradmem`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from gradmem.benchmarks import BENCHMARKS
from gradmem.benchmarks.recipes import RECIPES
from gradmem.cli.options import names_in, say
from gradmem.cli.paper import paper
from gradmem.cli.progress import Display
from gradmem.cli.sweep import sweep
from gradmem.data import DataError, load_cifar100, load_mnist
from gradmem.learners import LEARNERS
from gradmem.reports import (
    draw_pictures,
    failed_lines,
    markdown_table,
    summarize,
    terminal_table,
    write_page,
)
from gradmem.runs.experiment import Experiment
from gradmem.runs.folder import (
    RunFolder,
    check_folder,
    find_failures,
    find_runs,
    newest,
    read_run,
    write_whole,
)
from gradmem.runs.tensorboard import TensorBoardLog
from gradmem.streams.continuum import IID
from gradmem.validation import one_of
from gradmem.version import __version__

__all__ = ["main"]

app = typer.Typer(
    help="Continual learning with exact Gradient Episodic Memory, its rivals and its benchmarks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


STREAM = "The continuum"
SETTINGS = "The learner (where left out, the paper's best values for the benchmark)"

BenchmarkOption = Annotated[
    str,
    typer.Option(
        "--benchmark", help=f"What is learned: {', '.join(BENCHMARKS)}.", rich_help_panel=STREAM
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help='"sample" (5,000 bundled digits) or a folder with the data set. Left out: the folder '
        "in GRADMEM_DATA, the cache, or a download.",
        rich_help_panel=STREAM,
    ),
]
TasksOption = Annotated[int, typer.Option("--tasks", help="How many.", rich_help_panel=STREAM)]
ExamplesOption = Annotated[
    int | None,
    typer.Option(
        "--examples",
        help="Training examples per task. (default: 1000 of MNIST, all of CIFAR-100)",
        rich_help_panel=STREAM,
    ),
]
BatchSizeOption = Annotated[
    int, typer.Option("--batch-size", help="Examples per step.", rich_help_panel=STREAM)
]
EpochsOption = Annotated[
    int, typer.Option("--epochs", help="Passes over each task.", rich_help_panel=STREAM)
]
OrderOption = Annotated[
    str | None,
    typer.Option(
        "--order",
        help='Order of tasks: "random", or numbers such as 2,0,1,0 (a task may come back).',
        rich_help_panel=STREAM,
    ),
]
ShuffledOption = Annotated[
    bool,
    typer.Option(
        "--shuffled", help="Mix all tasks' examples (the iid oracle).", rich_help_panel=STREAM
    ),
]
EveryOption = Annotated[
    int | None,
    typer.Option(
        "--every", help="Also evaluate every so many examples, for learning curves. (default: off)"
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace another experiment's result in the folder.")
]
TensorBoardOption = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        help='Folder to log to for TensorBoard. (default: off; needs "gradmem\\[tensorboard]")',
    ),
]


def _tell_version(asked: bool) -> None:
    if asked:
        console.print(f"gradmem {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is.", callback=_tell_version),
    ] = False,
) -> None:
    pass


@app.command("run")
def run_command(
    benchmark: BenchmarkOption,
    learner: Annotated[str, typer.Option("--learner", help=f"Who learns: {', '.join(LEARNERS)}.")],
    seed: Annotated[int, typer.Option(help="Of data, network and learner.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. (default: runs/BENCHMARK/LEARNER-seedN)"),
    ] = None,
    data: DataOption = None,
    tasks: TasksOption = 20,
    examples: ExamplesOption = None,
    batch_size: BatchSizeOption = 10,
    epochs: EpochsOption = 1,
    order: OrderOption = None,
    shuffled: ShuffledOption = False,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.", rich_help_panel=SETTINGS)
    ] = None,
    memories: Annotated[
        int | None,
        typer.Option(
            help="gem, agem, ewc: examples remembered per task.", rich_help_panel=SETTINGS
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            help="gem, agem, icarl: examples remembered in all.", rich_help_panel=SETTINGS
        ),
    ] = None,
    distillation: Annotated[
        float | None,
        typer.Option(help="icarl: how much old answers count.", rich_help_panel=SETTINGS),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="gem: memory strength γ.", rich_help_panel=SETTINGS),
    ] = None,
    margin_rule: Annotated[
        str | None,
        typer.Option(
            help="gem: shift (γ added to v★) or floor (v ≥ γ).",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="agem: examples that make the average.", rich_help_panel=SETTINGS),
    ] = None,
    gradients: Annotated[
        str | None,
        typer.Option(
            help="gem: auto, chain, batched, func or loop; all are exact.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="gem: fp32, or tf32 or bf16 for the gradients on a GPU.", rich_help_panel=SETTINGS
        ),
    ] = None,
    regularization: Annotated[
        float | None, typer.Option(help="ewc: λ.", rich_help_panel=SETTINGS)
    ] = None,
    fisher: Annotated[
        str | None,
        typer.Option(
            help="ewc: batch (mean gradient, squared) or example.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="independent: a new network is a copy of the last, or random.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    every: EveryOption = None,
    device: DeviceOption = "cpu",
    tensorboard: TensorBoardOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Train one learner on one benchmark and write its folder.

    gradmem run --benchmark mnist-rotations --learner gem --data sample --out my-run
    """
    asked = {
        "lr": lr,
        "memories": memories,
        "budget": budget,
        "distillation": distillation,
        "margin": margin,
        "margin_rule": margin_rule,
        "sample": sample,
        "gradients": gradients,
        "precision": precision,
        "regularization": regularization,
        "fisher": fisher,
        "start": start,
    }
    experiment = Experiment(
        benchmark=benchmark,
        learner=learner,
        settings={name: value for name, value in asked.items() if value is not None},
        seed=seed,
        data=data,
        n_tasks=tasks,
        examples_per_task=examples,
        batch_size=batch_size,
        epochs=epochs,
        order=_order(order),
        shuffled=shuffled,
        every=every,
        device=device,
    )
    folder = out or Path("runs", benchmark, f"{learner}-seed{seed}")
    with Display(console) as display:
        _run(experiment, folder, display, overwrite, tensorboard)
    console.print(terminal_table(summarize([read_run(folder)])))
    say(console, f"Written: {folder / 'result.json'}")


@app.command()
def compare(
    benchmark: BenchmarkOption,
    learners: Annotated[
        str | None,
        typer.Option(
            "--learners",
            help="Names with commas between them. (default: all that have settings for it)",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds each, from --seed on.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results. (default: runs/BENCHMARK)")
    ] = None,
    data: DataOption = None,
    tasks: TasksOption = 20,
    examples: ExamplesOption = None,
    batch_size: BatchSizeOption = 10,
    epochs: EpochsOption = 1,
    order: OrderOption = None,
    shuffled: ShuffledOption = False,
    every: EveryOption = None,
    device: DeviceOption = "cpu",
    tensorboard: TensorBoardOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Run several learners at the paper's settings: one page, one table, pictures.

    gradmem compare --benchmark mnist-rotations --data sample --learners single,ewc,gem
    """
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    usual = RECIPES[one_of("benchmark", benchmark, RECIPES)]
    chosen = ",".join(usual) if learners is None else learners
    experiments = [
        Experiment(
            benchmark=benchmark,
            learner=name,
            seed=number,
            data=data,
            n_tasks=tasks,
            examples_per_task=examples,
            batch_size=batch_size,
            epochs=epochs,
            order=_order(order),
            shuffled=shuffled,
            every=every,
            device=device,
        )
        for number in range(seed, seed + seeds)
        for name in names_in(chosen)
    ]
    root = out or Path("runs", benchmark)
    folders = [root / f"{experiment.learner}-seed{experiment.seed}" for experiment in experiments]
    for experiment, folder in zip(experiments, folders, strict=True):
        RunFolder(folder, experiment).check(overwrite)  # before the first of them is run
    finished = []
    with Display(console) as display:
        for experiment, folder in zip(experiments, folders, strict=True):
            try:
                _run(experiment, folder, display, overwrite, tensorboard)
            except FloatingPointError as error:
                display.fail(str(error))  # one learner that diverges does not cost the others
            else:
                finished.append(folder)
    if not finished:
        raise FloatingPointError("no learner finished")
    _report(finished, root)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders with runs in or below them.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for what is written. (default: the first of RUNS)"),
    ] = None,
) -> None:
    """Make a page, report.html, with a table and pictures, from finished runs."""
    _report(runs, out or runs[0])


@app.command("data")
def data_command(
    data: Annotated[
        str | None,
        typer.Argument(
            help='A folder, or "sample" (MNIST). Left out: GRADMEM_DATA, cache or download.'
        ),
    ] = None,
    which: Annotated[str, typer.Option("--set", help="mnist or cifar100.")] = "mnist",
) -> None:
    """Find or fetch a data set, check it, and say where it is."""
    load = {"mnist": load_mnist, "cifar100": load_cifar100}[
        one_of("--set", which, ("mnist", "cifar100"))
    ]
    images = load(data)
    say(console, f"{which}: {images}\nfrom {images.source}")


app.command()(sweep)
app.command()(paper)


def main() -> None:
    """Run the command; what the user can put right is one line, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter
    try:
        app()
    except (ValueError, TypeError, DataError, FloatingPointError, OSError) as error:
        message = Text.assemble(("error: ", "red"), _as_typed(error))
        Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2 if isinstance(error, ValueError | TypeError) else 1)


#: What the errors of the package call what is typed here.
TYPED = {
    "n_tasks": "--tasks",
    "examples_per_task": "--examples",
    "batch_size": "--batch-size",
    "first_tasks": "--first-tasks",
    "held_out": "--held-out",
    "data=FOLDER": "--data FOLDER",
}


def _as_typed(error: Exception) -> str:
    """The message, with the names of options."""
    message = str(error)
    for name, option in TYPED.items():
        message = re.sub(rf"\b{name}\b", option, message)
    return message


def _run(
    experiment: Experiment,
    folder: Path,
    display: Display,
    overwrite: bool,
    tensorboard: Path | None = None,
) -> None:
    name = f"{experiment.learner}, seed {experiment.seed}"
    if experiment.shuffled:
        name = f"{name}, {IID}"
    display.start(name)
    experiment.continuum()  # what is wrong with the data is found before a folder is made
    target = RunFolder(folder, experiment)
    log = None
    if tensorboard is not None:
        log = TensorBoardLog(tensorboard / experiment.benchmark / folder.name)

    def on_progress(progress: Any) -> None:
        display.update(progress)
        if log is not None:
            (log.on_batch if progress.partial is None else log.on_task)(progress)
        if progress.partial is not None:
            target.save_partial(progress.partial)

    try:
        target.open(overwrite)
        target.save(experiment.run(on_progress))
    except KeyboardInterrupt:
        display.fail("interrupted")
        known = folder / "partial.json"
        where = f"The tasks finished so far are in {known}." if known.exists() else ""
        say(display.console, f"Interrupted. {where}")
        raise
    finally:
        if log is not None:
            log.close()


def _report(runs: list[Path], out: Path) -> None:
    found = find_runs(runs, _left_out)
    counted = newest(found)
    if len(counted) < len(found):
        n = len(found) - len(counted)
        which = "1 run" if n == 1 else f"{n} runs"
        _left_out(which, "same experiment and seed as a newer run")
    check_folder(out)
    rows = summarize(counted)
    out.mkdir(parents=True, exist_ok=True)
    failed = failed_lines(find_failures(runs))
    table = out / "table.md"
    write_whole(table, markdown_table(rows, failed))
    written = [write_page(rows, out / "report.html", failed), table, *draw_pictures(rows, out)]
    console.print(terminal_table(rows))
    if failed:
        more = f"\n  and {len(failed) - 5} more" if len(failed) > 5 else ""
        lines = "".join(f"\n  {line}" for line in failed[:5]) + more
        say(console, f"Failed:{lines}")
    say(console, "Written:")
    for path in written:
        say(console, f"  {path}")


def _left_out(what: Path | str, why: str) -> None:
    say(console, f"Left out: {what} ({why})")


def _order(text: str | None) -> str | tuple[int, ...] | None:
    if text is None or text == "random":
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f'--order must be "random" or numbers such as 2,0,1; got {text!r}'
        ) from None
