"""Pictures of runs: each learner's matrix R, and the first task's accuracy over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.learners import LEARNERS
from gradmem.report.summary import Row

__all__ = ["draw_pictures"]

# Apart in lightness as well as in hue, with a marker each: readable in black and white. A learner
# has the same in every picture.
STYLES = (
    ("#b3a125", "v"),
    ("#7f7f7f", "^"),
    ("#4c9be8", "s"),
    ("#d1495b", "D"),
    ("#1b1b3a", "o"),
    ("#6aa84f", "P"),
)


def _style(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """A colour and a marker by learner; a dash for its second row, and so on."""
    learner = row.runs[0].config["learner"]
    names = list(LEARNERS)
    place = names.index(learner) if learner in names else len(names)
    colour, marker = STYLES[place % len(STYLES)]
    alike = [other for other in rows if other.runs[0].config["learner"] == learner]
    line = ("-", "--", ":", "-.")[alike.index(row) % 4]
    return {"color": colour, "marker": marker, "linestyle": line}


def draw_pictures(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Draw every row's R, and the first task's curves of each benchmark; the files written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = [_matrix(row, folder) for row in rows]
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        members = [row for row in rows if row.benchmark == benchmark]
        written.append(_first_task(benchmark, members, folder))
    return written


def _matrix(row: Row, folder: Path) -> Path:
    """R as a heat map: what was learned lies on the diagonal, what was kept to the lower left."""
    R = row.R
    n_rows, T = R.shape
    figure, axes = _figure(width=5.6, height=max(1.8, 4.4 * n_rows / T + 0.9))
    image = axes.imshow(R, vmin=0, vmax=1, cmap="viridis", aspect="equal")
    axes.set_title(f"{row.name} on {row.benchmark}: ACC {row.estimate('acc').format('.3f')}")
    axes.set_xlabel("tested on task")
    axes.set_ylabel("after learning task")
    axes.set_xticks(_ticks(T), labels=[str(i + 1) for i in _ticks(T)])
    axes.set_yticks(_ticks(n_rows), labels=[str(i + 1) for i in _ticks(n_rows)])
    if T <= 10:
        for (i, j), value in np.ndenumerate(R):
            colour = "black" if value > 0.6 else "white"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)
    figure.colorbar(image, ax=axes, label="test accuracy", fraction=0.046, pad=0.03)
    return _save(figure, folder / f"R-{_slug(row.benchmark)}-{_slug(row.name)}.png")


def _first_task(benchmark: str, rows: Sequence[Row], folder: Path) -> Path:
    """Test accuracy on the first task as more of the continuum is observed."""
    figure, axes = _figure(width=7, height=4.2)
    for row in rows:
        examples, accuracy = row.first_task
        every = max(1, len(examples) // 20)
        axes.plot(
            examples,
            accuracy,
            **_style(row, rows),
            markevery=every,
            markersize=4,
            label=row.name,
        )
    axes.set_title(f"First task of {benchmark}, as more tasks are learned")
    axes.set_xlabel("examples observed")
    axes.set_ylabel("test accuracy on the first task")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _save(figure, folder / f"first-task-{_slug(benchmark)}.png")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # Figure itself, not pyplot: no window system is touched and nothing stays open.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    return figure, figure.add_subplot()


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    return path


def _ticks(n: int) -> range:
    return range(0, n, max(1, -(-n // 10)))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.=]+", "-", name.lower()).strip("-")
