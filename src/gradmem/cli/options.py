"""Options that commands over many runs have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradmem.reproduction.plan import SAMPLE

__all__ = [
    "STREAM",
    "WHAT",
    "WHERE",
    "DataOption",
    "DeviceOption",
    "ExamplesOption",
    "RetryFailedOption",
    "TasksOption",
    "lasting",
    "names_in",
    "say",
]

#: Headings in a command's help.
WHAT = "What is run"
STREAM = "The continuum (where left out, as in the paper)"
WHERE = "Where it is run"

DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help='"sample" or a folder. Left out: GRADMEM_DATA, the cache, or a download.',
        rich_help_panel=STREAM,
    ),
]
TasksOption = Annotated[
    int | None, typer.Option("--tasks", help="How many.", rich_help_panel=STREAM)
]
ExamplesOption = Annotated[
    int | None,
    typer.Option("--examples", help="Training examples per task.", rich_help_panel=STREAM),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, …", rich_help_panel=WHERE)
]
RetryFailedOption = Annotated[
    bool, typer.Option("--retry-failed", help="Run again what failed.", rich_help_panel=WHERE)
]


def names_in(text: str) -> list[str]:
    """Names with commas between them, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def say(console: Console, line: str) -> None:
    """Print a line as it is: paths may look like markup."""
    console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


def lasting(data: str | None) -> str | None:
    """`--data` for runs that may be gone on with from another folder."""
    if data is None or data == SAMPLE or not Path(data).expanduser().exists():
        return data
    return os.path.abspath(Path(data).expanduser())
