"""R as a heat map; `web/heat_map.js` draws the one on the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradmem.reports.pictures.figure import new_figure, save, short, slug, task_names, ticks
from gradmem.reports.summary import Row, bounds

__all__ = ["draw_heat_map"]


#: Letters of the tasks' names that fit side by side below the heat map.
LETTERS = 36


def draw_heat_map(row: Row, folder: Path) -> list[Path]:
    """R as a heat map: a row per task learned, a column per task tested."""
    R = row.R
    n_rows, T = R.shape
    flat = n_rows * 2 < T
    figure, axes = new_figure(width=5.6, height=4.4 * n_rows / T + (2.1 if flat else 0.9))
    low, high = bounds([row]) or (R.min(), R.max())
    image = axes.imshow(R, vmin=low, vmax=high, cmap="cividis", aspect="equal")
    title = f"{short(row.name)} on {short(row.benchmark)}: ACC {row.text('acc')}"
    axes.set_title(title, wrap=True)
    axes.set_xlabel("tested on task")
    axes.set_ylabel("after learning task" if n_rows > 4 else "after")
    names = [short(name) for name in task_names(row)]
    shown = [names[j] for j in ticks(T)]
    turned = {"rotation": 45, "ha": "right"} if sum(map(len, shown)) > LETTERS else {}
    axes.set_xticks(ticks(T), labels=shown, **turned)
    learned = row.runs[0].result.get("learned") or range(n_rows)
    after = ["all" if learned[i] is None else names[learned[i]] for i in ticks(n_rows)]
    axes.set_yticks(ticks(n_rows), labels=after)
    if T <= 10:
        for (i, j), value in np.ndenumerate(R):
            colour = "black" if value > (low + high) / 2 else "white"
            # Three digits: 1520, not 1.52e+03.
            text = f"{value:.2f}" if (low, high) == (0, 1) else f"{float(f'{value:.3g}'):g}"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
    bar = {"orientation": "horizontal", "aspect": 40} if flat else {"fraction": 0.046}
    figure.colorbar(image, ax=axes, label=short(row.runs[0].measure), pad=0.03, **bar)
    return save(figure, folder, f"R-{slug(row.benchmark)}-{slug(row.name)}")
