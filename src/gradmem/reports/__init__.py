"""From finished runs to a table, pictures and a page."""

from gradmem.reports.page import write_page
from gradmem.reports.pictures import draw_bars, draw_first_task, draw_pictures
from gradmem.reports.report import Report, gather, report
from gradmem.reports.summary import Estimate, Row, failed_lines, next_run, summarize
from gradmem.reports.table import markdown_table, terminal_table

__all__ = [
    "Estimate",
    "Report",
    "Row",
    "draw_bars",
    "draw_first_task",
    "draw_pictures",
    "failed_lines",
    "gather",
    "markdown_table",
    "next_run",
    "report",
    "summarize",
    "terminal_table",
    "write_page",
]
