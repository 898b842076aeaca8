"""From runs to a folder with a page, a table and pictures."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gradmem.evaluation.result import Result
from gradmem.evaluation.result_folder import check_folder
from gradmem.files import write_whole
from gradmem.reports.page import write_page
from gradmem.reports.pictures import draw_pictures
from gradmem.reports.summary import Row, failed_lines, summarize
from gradmem.reports.table import markdown_table
from gradmem.runs.read_folder import Run, find_failures, find_runs, newest, printable

__all__ = ["Report", "gather", "report"]

Source = str | os.PathLike[str] | Result


@dataclass(frozen=True)
class Report:
    """What is to be reported: rows of finished runs, and lines about those that failed."""

    rows: list[Row]
    failed: list[str]

    def write(self, out: str | os.PathLike[str]) -> list[Path]:
        """Write report.html, table.md and the pictures into a folder, and return their paths."""
        out = Path(out)
        check_folder(out)
        out.mkdir(parents=True, exist_ok=True)
        table = out / "table.md"
        write_whole(table, markdown_table(self.rows, self.failed))
        page = write_page(self.rows, out / "report.html", self.failed)
        return [page, table, *draw_pictures(self.rows, out)]


def report(runs: Source | Iterable[Source], out: str | os.PathLike[str]) -> Path:
    """Write a page, a table and pictures about runs.

    Parameters
    ----------
    runs
        Folders with runs in or below them (`Result.save`, `gradmem run`, `gradmem sweep`), results
        of `run`, or both: one of them or several. Runs that differ in nothing but their seed
        become one row. What cannot be read is left out with a warning.
    out
        Folder for report.html, table.md and the pictures; made if need be.

    Returns
    -------
    Path
        The page, report.html.

    Examples
    --------
    >>> import gradmem as gm, tempfile
    >>> continuum = gm.mnist_rotations(n_tasks=2, examples_per_task=50, data="sample")
    >>> results = [gm.run(kind(gm.mlp()), continuum) for kind in (gm.Single, gm.GEM)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gm.report(results, folder).name
    'report.html'
    """
    return gather(runs).write(out)[0]


def gather(
    runs: Source | Iterable[Source], on_left_out: Callable[[Path | str, str], None] | None = None
) -> Report:
    """Find and read the runs of a report.

    `on_left_out` is called with what is left out and why; if there is none, it is a warning.
    """
    tell = on_left_out or _warn
    sources = [runs] if isinstance(runs, str | os.PathLike | Result) else list(runs)
    results = {id(source): source for source in sources if isinstance(source, Result)}
    made = [Run.of(result) for result in results.values()]
    folders = [source for source in sources if not isinstance(source, Result)]
    if not sources:
        raise ValueError("report needs at least one run's folder or Result, got none")
    found = find_runs(folders, tell) if folders else []
    counted = newest(found)
    if left := len(found) - len(counted):
        which = "1 run" if left == 1 else f"{left} runs"
        tell(which, "same experiment and seed as a newer run")
    return Report(summarize([*counted, *made]), failed_lines(find_failures(folders)))


def _warn(what: Path | str, why: str) -> None:
    warnings.warn(
        f"left out of the report: {printable(str(what))} ({printable(why)})", stacklevel=4
    )
