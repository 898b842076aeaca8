"""The summary as a table: for the terminal, and for a README."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from gradmem.report.summary import Row

__all__ = ["markdown_table", "terminal_table"]

COLUMNS = ("acc", "bwt", "fwt", "seconds")


def terminal_table(rows: Sequence[Row]) -> Table:
    """Learner, ACC, BWT, FWT and seconds, a row per learner."""
    table = Table(title=_title(rows), title_justify="left")
    for i, heading in enumerate(_headings(rows)):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i > 0)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.benchmark != row.benchmark:
            table.add_section()
        table.add_row(*_cells(row, rows))
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """The same as Markdown."""
    lines = [_headings(rows), ["---"] + ["---:"] * len(COLUMNS)]
    lines += [_cells(row, rows) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _title(rows: Sequence[Row]) -> str:
    seeds = max(len(row.runs) for row in rows)
    names = ", ".join(dict.fromkeys(row.benchmark for row in rows))
    return names if seeds == 1 else f"{names}: mean of {seeds} seeds ± 95% interval"


def _headings(rows: Sequence[Row]) -> list[str]:
    return ["learner", *(name.upper() for name in COLUMNS[:-1]), "seconds"]


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    several = len({other.benchmark for other in rows}) > 1
    name = f"{row.benchmark}, {row.name}" if several else row.name
    return [
        name,
        row.estimate("acc").format(".3f"),
        row.estimate("bwt").format("+.3f"),
        row.estimate("fwt").format("+.3f"),
        row.estimate("seconds").format(".1f"),
    ]
