"""From a proposed gradient to the closest one that no remembered task objects to."""

from gradmem.projection.pivoting import solve_all
from gradmem.projection.project import BOUNDS, MARGIN_RULES, Projection, project, solve_dual
from gradmem.projection.shortlist import Shortlist

__all__ = [
    "BOUNDS",
    "MARGIN_RULES",
    "Projection",
    "Shortlist",
    "project",
    "solve_all",
    "solve_dual",
]
