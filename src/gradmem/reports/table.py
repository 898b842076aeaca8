"""The summary as a table: for the terminal, and for a README."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table

from gradmem.reports.summary import Row, seeds_text
from gradmem.runs.read_folder import printable

__all__ = ["literal", "markdown_table", "terminal_table"]

COLUMNS = ("acc", "bwt", "fwt", "seconds")

#: The columns that a narrow terminal leaves out, in this order.
DROPPED = ("fwt", "seconds", "bwt")

#: A word of a name that is longer may be broken.
LONGEST_WORD = 30


def terminal_table(rows: Sequence[Row]) -> RenderableType:
    """Learner, ACC, BWT, FWT and seconds; a narrow terminal shows fewer columns."""
    return _Fitted(rows)


def markdown_table(rows: Sequence[Row], failed: Sequence[str] = ()) -> str:
    """The same as Markdown, with all columns, and the lines about failed runs below it."""
    lines = [["learner", *map(_heading, COLUMNS)], ["---"] + ["---:"] * len(COLUMNS)]
    lines += [[literal(_name(row, rows)), *_numbers(row).values()] for row in rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    if caption := _caption(rows):
        text += f"\n{literal(caption)}\n"
    if failed:
        text += "\nFailed:\n\n" + "".join(f"- {literal(line)}\n" for line in failed)
    return text


class _Fitted:
    """A table that leaves out columns for which the terminal is too narrow."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.names = [_name(row, rows) for row in rows]
        self.numbers = [_numbers(row) for row in rows]
        self.widths = {
            column: max(len(_heading(column)), *(len(cells[column]) for cells in self.numbers))
            for column in COLUMNS
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self._columns(options.max_width)
        left = [_heading(column) for column in COLUMNS if column not in columns]
        benchmarks = "; ".join(dict.fromkeys(row.benchmark for row in self.rows))
        seeds = seeds_text(self.rows)
        captions = [_caption(self.rows), f"No room for {', '.join(left)}" if left else ""]
        table = Table(
            title=escape(f"{benchmarks}: {seeds} ± 95% interval" if seeds else benchmarks),
            title_justify="left",
            caption=escape("\n".join(filter(None, captions))) or None,
            caption_justify="left",
        )
        # Long text is folded, not cut off.
        table.add_column("learner", overflow="fold")
        for column in columns:
            width = self.widths[column]
            table.add_column(_heading(column), justify="right", width=width, overflow="fold")
        before = self.rows[0]
        for row, name, numbers in zip(self.rows, self.names, self.numbers, strict=True):
            if before.benchmark != row.benchmark:
                table.add_section()
            table.add_row(escape(name), *(numbers[column] for column in columns))
            before = row
        yield table

    def _columns(self, width: int) -> list[str]:
        """The columns that leave room for the longest word of a name."""
        word = min(LONGEST_WORD, max(len(word) for name in self.names for word in name.split()))
        columns = list(COLUMNS)
        for dropped in DROPPED:
            # Each column has a border and two spaces, and there is one border more.
            taken = sum(self.widths[column] + 3 for column in columns)
            if taken + word + 4 <= width:
                break
            columns.remove(dropped)
        return columns


def _caption(rows: Sequence[Row]) -> str:
    """What the metrics are of, if not of accuracies."""
    scores = list(dict.fromkeys(row.score for row in rows))
    return "" if scores == ["accuracy"] else f"ACC, BWT and FWT are of {' and '.join(scores)}."


def literal(text: str) -> str:
    """Text on one line of Markdown that ends no cell, begins no tag and steers no terminal."""
    return re.sub(r"([\\|<])", r"\\\1", printable(text))


def _heading(column: str) -> str:
    return column if column == "seconds" else column.upper()


def _name(row: Row, rows: Sequence[Row]) -> str:
    several = len({other.benchmark for other in rows}) > 1
    return f"{row.benchmark}, {row.name}" if several else row.name


def _numbers(row: Row) -> dict[str, str]:
    return {column: row.text(column) for column in COLUMNS}
