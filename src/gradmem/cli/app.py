"""What can be typed after `gradmem`."""

from __future__ import annotations

import io
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from gradmem.cli import options
from gradmem.cli.console import say, shown
from gradmem.cli.listing import benchmarks_command, learners_command
from gradmem.cli.paper import paper_command
from gradmem.cli.report import report_command
from gradmem.cli.run import compare_command, run_command
from gradmem.cli.sweep import sweep_command
from gradmem.data import DataError, load_cifar100, load_mnist
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

app.command("run", context_settings=options.ANY_OPTION)(run_command)
app.command("compare", context_settings=options.ANY_OPTION)(compare_command)
app.command("sweep")(sweep_command)
app.command("report")(report_command)
app.command("learners")(learners_command)
app.command("benchmarks")(benchmarks_command)
app.command("paper")(paper_command)

#: Whether errors are shown with a traceback.
_debug = False


def _tell_version(asked: bool) -> None:
    if asked:
        say(f"gradmem {__version__}")
        raise typer.Exit


@app.callback()
def common_options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is.", callback=_tell_version),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error: gradmem --debug run …")
    ] = False,
) -> None:
    global _debug
    _debug = debug


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
    say(f"{which}: {images}\nfrom {images.source}")


def main() -> None:
    """Run the command; show expected errors as one line, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # letters that the terminal cannot show
    try:
        app()
    except (ValueError, TypeError, DataError, FloatingPointError, OSError) as error:
        if _debug:
            raise
        # Options with another name than in Python: the message has the Python name.
        typed = [f"{name} is {o}" for name, o in options.OPTION_NAMES.items() if name in str(error)]
        if not _is_ours(error):
            typed.append("gradmem --debug … shows where")
        more = f" ({', '.join(typed)})" if typed else ""
        message = Text.assemble(("error: ", "red"), shown(str(error)), more)
        Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2 if isinstance(error, ValueError | TypeError) else 1)


def _is_ours(error: BaseException) -> bool:
    """Whether gradmem itself raised it: then the message says what is to be put right."""
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(__file__).parents[1] in Path(raised).parents
