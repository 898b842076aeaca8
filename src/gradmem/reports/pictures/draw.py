"""All pictures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradmem.reports.pictures.acc_against_memory import draw_acc_against_memory
from gradmem.reports.pictures.bars import draw_bars
from gradmem.reports.pictures.first_task import draw_first_task
from gradmem.reports.pictures.heat_map import draw_heat_map
from gradmem.reports.styles import styles
from gradmem.reports.summary import Row, leading, memory_lines

__all__ = ["draw_pictures"]

#: Rows of one benchmark that a picture can hold, and matrices drawn. The page has all of them.
LIMIT = 8


def draw_pictures(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Draw each benchmark's matrices R, first task, bars and, where it varies, memory.

    Of a benchmark with many rows, every learner's best ones are drawn. The folder is made if need
    be; returns the files written.
    """
    folder = Path(folder)
    look = styles(row.learner for row in rows)
    written = []
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        every = [row for row in rows if row.benchmark == benchmark]
        members = leading(every, LIMIT)
        for row in members:
            written += draw_heat_map(row, folder)
        written += draw_first_task(benchmark, members, folder, look)
        written += draw_bars(benchmark, members, folder, look)
        lines = memory_lines(every)
        if lines:
            lines.sort(key=lambda line: -max(row.estimate("acc").mean for row in line.rows))
            written += draw_acc_against_memory(benchmark, lines[:LIMIT], look, folder)
    return written
