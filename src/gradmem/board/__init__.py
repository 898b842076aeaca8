"""The board: every learner at several sizes of memory, with what learning cost beside ACC.

Settings are chosen on held-out data with other seeds than those that are reported.
"""

from gradmem.board.entries import ENTRIES, Entry
from gradmem.board.kept import Kept, Searched, keep, load
from gradmem.board.page import learner_text, page_text, write_board
from gradmem.board.plan import BENCHMARKS, MEMORIES, Cell, Column, Conditions, cells_of
from gradmem.board.runs import make_cells

__all__ = [
    "BENCHMARKS",
    "ENTRIES",
    "MEMORIES",
    "Cell",
    "Column",
    "Conditions",
    "Entry",
    "Kept",
    "Searched",
    "cells_of",
    "keep",
    "learner_text",
    "load",
    "make_cells",
    "page_text",
    "write_board",
]
