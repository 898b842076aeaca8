"""Pictures of runs for papers, one kind per file, each written as PNG and PDF."""

from gradmem.reports.pictures.bars import draw_bars
from gradmem.reports.pictures.draw import draw_pictures
from gradmem.reports.pictures.first_task import draw_first_task

__all__ = ["draw_bars", "draw_first_task", "draw_pictures"]
