"""From finished runs to a table, pictures and a page."""

from gradmem.report.page import write_page
from gradmem.report.pictures import draw_bars, draw_first_task, draw_pictures
from gradmem.report.summary import Estimate, Row, failed_lines, summarize
from gradmem.report.table import markdown_table, terminal_table

__all__ = [
    "Estimate",
    "Row",
    "draw_bars",
    "draw_first_task",
    "draw_pictures",
    "failed_lines",
    "markdown_table",
    "summarize",
    "terminal_table",
    "write_page",
]
