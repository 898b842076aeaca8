"""`gradmem report`: a page, a table and pictures of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradmem.cli.options import OutOption, say
from gradmem.reports import (
    draw_pictures,
    failed_lines,
    markdown_table,
    summarize,
    terminal_table,
    write_page,
)
from gradmem.runs.folder import check_folder, find_failures, find_runs, newest, write_whole

__all__ = ["report_command", "write_report"]

console = Console()


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders with runs in or below them.")],
    out: OutOption = None,
) -> None:
    """Make a page, report.html, with a table and pictures, in --out or the first of RUNS."""
    write_report(runs, out or runs[0])


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Write what a report consists of, and show its table."""
    found = find_runs(folders, _left_out)
    counted = newest(found)
    if left := len(found) - len(counted):
        which = "1 run" if left == 1 else f"{left} runs"
        _left_out(which, "same experiment and seed as a newer run")
    check_folder(out)
    rows = summarize(counted)
    out.mkdir(parents=True, exist_ok=True)
    failed = failed_lines(find_failures(folders))
    table = out / "table.md"
    write_whole(table, markdown_table(rows, failed))
    written = [write_page(rows, out / "report.html", failed), table, *draw_pictures(rows, out)]
    console.print(terminal_table(rows))
    if failed:
        more = f"\n  and {len(failed) - 5} more" if len(failed) > 5 else ""
        say(console, "Failed:" + "".join(f"\n  {line}" for line in failed[:5]) + more)
    say(console, "Written:")
    for path in written:
        say(console, f"  {path}")


def _left_out(what: Path | str, why: str) -> None:
    say(console, f"Left out: {what} ({why})")
