"""ACC, BWT and FWT as bars (Figure 1, left)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.reports.pictures.figure import (
    FORMATS,
    add_legend,
    new_figure,
    or_zero,
    save,
    short,
    slug,
    variant_of,
)
from gradmem.reports.published import PUBLISHED, published
from gradmem.reports.styles import Style, Variant, paler
from gradmem.reports.summary import Row, seeds_text

__all__ = ["draw_bars"]

METRICS = ("acc", "bwt", "fwt")

#: Published values among the bars.
DIAMONDS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "d",
    "markersize": 5,
    "markerfacecolor": "white",
    "markeredgecolor": "black",
    "zorder": 3,
}


def draw_bars(
    benchmark: str,
    rows: Sequence[Row],
    folder: str | Path,
    look: dict[str, Style],
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """ACC, BWT and FWT side by side, as in the paper's Figure 1."""
    figure, axes = new_figure(width=7, height=3.6)
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        x = np.arange(len(METRICS)) + (i - (len(rows) - 1) / 2) * width
        _bars_of_row(axes, x, width, row, look[row.learner], variant_of(row, rows))
    if any(published(row) for row in rows):
        axes.plot([], [], label=PUBLISHED, **DIAMONDS)
    axes.axhline(0, color="black", linewidth=0.8)
    if rows[0].score != "accuracy":
        axes.set_ylabel(short(rows[0].score, 40))
    axes.set_xticks(range(len(METRICS)), labels=[name.upper() for name in METRICS])
    axes.set_xlim(-0.5, len(METRICS) - 0.5)
    seeds = seeds_text(rows)
    spread = f", {seeds} and 95% interval" if seeds else ""
    axes.set_title(f"{short(benchmark)}{spread}", wrap=True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    add_legend(figure, axes)
    return save(figure, folder, f"bars-{slug(benchmark)}", formats)


def _bars_of_row(axes: Any, x: Any, width: float, row: Row, style: Style, variant: Variant) -> None:
    """A row's bars at the positions `x`, with intervals and, as diamonds, the published values."""
    estimates = [row.estimate(name) for name in METRICS]
    means = [estimate.mean for estimate in estimates]
    axes.bar(
        x,
        means,
        width * 0.92,
        color=paler(style.colour, variant.shade),
        edgecolor="black" if variant.ruled else "white",
        hatch="||" if variant.ruled else style.hatch,
        label=short(row.name),
    )
    halves = [or_zero(estimate.half_width) for estimate in estimates]
    if any(halves):
        _whiskers(axes, x, means, halves, min(3, 20 * width))
    if known := published(row):
        axes.plot(x, list(known.values()), **DIAMONDS)


def _whiskers(axes: Any, x: Any, means: Any, halves: Any, cap: float) -> None:
    """Intervals in black with a white rim, to be seen on any bar."""
    from matplotlib.patheffects import withStroke

    drawn = axes.errorbar(
        x, means, halves, fmt="none", ecolor="black", elinewidth=1, capsize=cap, zorder=2.5
    )
    _, caps, lines = drawn.lines
    for part in (*caps, *lines):
        part.set_path_effects([withStroke(linewidth=3, foreground="white")])
