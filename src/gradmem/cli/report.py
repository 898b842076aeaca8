"""`gradmem report`: a page, a table and pictures of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradmem.cli import options
from gradmem.cli.console import console, say
from gradmem.reports import gather, terminal_table

__all__ = ["report_command", "write_report"]


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders with runs in or below them.")],
    out: options.Out = None,
) -> None:
    """Make a page, report.html, with a table and pictures, in --out or the first of RUNS."""
    write_report(runs, out or runs[0])


def write_report(folders: Sequence[Path], out: Path, brief: bool = False) -> None:
    """Write what a report consists of, and show its table; if brief, name its files in one line."""
    report = gather(folders, lambda what, why: say(f"Left out: {what} ({why})"))
    written = report.write(out)
    console.print(terminal_table(report.rows))
    if failed := report.failed:
        more = f"\n  and {len(failed) - 5} more" if len(failed) > 5 else ""
        say("Failed:" + "".join(f"\n  {line}" for line in failed[:5]) + more)
    if brief:
        kinds = ", ".join(sorted({path.suffix[1:] for path in written}))
        say(f"Written: {len(written)} files ({kinds}) in {out}")
        return
    say("Written:")
    for path in written:
        say(f"  {path}")
