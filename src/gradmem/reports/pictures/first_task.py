"""The score on the first task while more tasks are learned (Figure 1, right)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.reports.pictures.figure import (
    FORMATS,
    add_legend,
    line_look,
    new_figure,
    save,
    short,
    slug,
    variant_of,
)
from gradmem.reports.published import PUBLISHED, published_first_task
from gradmem.reports.styles import Style
from gradmem.reports.summary import Row, bounds

__all__ = ["draw_first_task"]

#: A published curve, under the measured one of its colour.
DOTTED: dict[str, Any] = {"linestyle": (0, (1, 1.2)), "linewidth": 1.1, "alpha": 0.8, "zorder": 1}


def draw_first_task(
    benchmark: str,
    rows: Sequence[Row],
    folder: str | Path,
    look: dict[str, Style],
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """The test score on the first task as more of the continuum is observed (Figure 1, right).

    Thin vertical lines are where a learner without task labels found that a task begins.
    """
    figure, axes = new_figure(width=7, height=4.2)
    for row in rows:
        examples, scores = row.first_task
        axes.plot(
            examples,
            scores,
            markevery=max(1, len(examples) // 20),
            markersize=5,
            **line_look(look[row.learner], variant_of(row, rows)),
            label=short(row.name),
        )
        for n in row.boundaries:
            colour = look[row.learner].colour
            axes.axvline(n, color=colour, linewidth=0.5, alpha=0.5 / len(row.runs), zorder=0)
    known = [(row, values) for row in rows if (values := published_first_task(row))]
    for row, values in known:
        x = np.linspace(0, row.first_task[0][-1], len(values))
        axes.plot(x, values, color=look[row.learner].colour, **DOTTED)
    if known:
        axes.plot([], [], color="black", label=PUBLISHED, **DOTTED)
    axes.set_title(f"First task of {short(benchmark)}, as more tasks are learned", wrap=True)
    axes.set_xlabel("examples observed")
    axes.set_ylabel(f"{short(rows[0].runs[0].measure, 40)} on the first task")
    axes.set_ylim(bounds(rows))
    axes.grid(alpha=0.3)
    add_legend(figure, axes)
    return save(figure, folder, f"first-task-{slug(benchmark)}", formats)
