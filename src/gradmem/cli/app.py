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
from gradmem.cli.board import board_command
from gradmem.cli.console import say, shown
from gradmem.cli.demo import demo_command
from gradmem.cli.doctor import doctor_command
from gradmem.cli.listing import benchmarks_command, data_command, learners_command
from gradmem.cli.paper import paper_command
from gradmem.cli.report import report_command
from gradmem.cli.run import compare_command, run_command
from gradmem.cli.sweep import sweep_command
from gradmem.data import DataError
from gradmem.version import __version__

__all__ = ["main"]

app = typer.Typer(
    help="Continual learning with exact Gradient Episodic Memory, its rivals and its benchmarks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Headings of `gradmem --help`: what one wants to do.
FIRST = "See it work"
TRAIN = "Train and compare"
READ = "Look at results"
KNOW = "Know what there is"
PAPER = "Make published numbers again"

app.command("demo", rich_help_panel=FIRST)(demo_command)
app.command("doctor", rich_help_panel=FIRST)(doctor_command)
app.command("run", context_settings=options.ANY_OPTION, rich_help_panel=TRAIN)(run_command)
app.command("compare", context_settings=options.ANY_OPTION, rich_help_panel=TRAIN)(compare_command)
app.command("sweep", rich_help_panel=TRAIN)(sweep_command)
app.command("report", rich_help_panel=READ)(report_command)
app.command("learners", rich_help_panel=KNOW)(learners_command)
app.command("benchmarks", rich_help_panel=KNOW)(benchmarks_command)
app.command("data", rich_help_panel=KNOW)(data_command)
app.command("paper", rich_help_panel=PAPER)(paper_command)
app.command("board", rich_help_panel=PAPER)(board_command)

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
        message = Text.assemble(("error: ", "red"), shown(options.as_typed(str(error))), more)
        Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2 if isinstance(error, ValueError | TypeError) else 1)


def _is_ours(error: BaseException) -> bool:
    """Whether gradmem itself raised it: then the message says what is to be put right."""
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(__file__).parents[1] in Path(raised).parents
