"""A score against what it cost: one panel per cost, and the line of those that none outdoes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradmem.reports.pictures.figure import FORMATS, or_zero, save, short
from gradmem.reports.styles import Style
from gradmem.reports.summary import Estimate

__all__ = ["Point", "draw_frontier", "frontier"]

#: Where a name may stand, in points from its mark: the nearer the better, rather to the right.
PLACES = [(x, y) for y in (0, 9, -9, 18, -18, 27, -27, 36, -36, 45, -45) for x in (7, -7)]

#: The line from a mark to a name that is not next to it.
LEADER: dict[str, Any] = {
    "arrowstyle": "-", "color": "0.6", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3
}  # fmt: skip

#: Width and height of a letter, in points.
LETTER = (4.7, 9.0)


@dataclass(frozen=True, eq=False)
class Point:
    """A learner: its score, and what it cost by the names of the costs."""

    name: str
    learner: str
    score: Estimate
    costs: Mapping[str, float]


def frontier(points: Sequence[Point], cost: str) -> list[Point]:
    """Those of which none has a higher score at the same cost or less, the cheapest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.costs[cost], -p.score.mean)):
        if not best or point.score.mean > best[-1].score.mean:
            best.append(point)
    return best


def draw_frontier(
    title: str,
    points: Sequence[Point],
    folder: str | Path,
    name: str,
    look: Mapping[str, Style],
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """One panel per cost, with a logarithmic axis; whiskers are intervals of the score."""
    from matplotlib.figure import Figure

    costs = list(points[0].costs)
    figure = Figure(figsize=(5.5 * len(costs), 4.6), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for axes, cost in zip(panels, costs, strict=True):
        for point in points:
            style = look[point.learner]
            axes.errorbar(
                point.costs[cost],
                point.score.mean,
                yerr=or_zero(point.score.half_width),
                color=style.colour,
                marker=style.marker,
                markersize=6,
                capsize=3,
                linestyle="none",
                zorder=3,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(_few_between)
        axes.set_xlabel(cost)
        axes.grid(alpha=0.3)
        axes.margins(x=0.18, y=0.08)
        _draw_line(axes, frontier(points, cost), cost)
    panels[0].set_ylabel("ACC")
    figure.suptitle(short(title))
    figure.draw_without_rendering()
    for axes, cost in zip(panels, costs, strict=True):
        _name_points(axes, points, cost)
    return save(figure, folder, name, formats)


def _few_between(value: float, place: int | None = None) -> str:
    """A number between two powers of ten, if it is 2 or 5 times one of them."""
    del place  # where it stands among the others
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _draw_line(axes: Any, line: Sequence[Point], cost: str) -> None:
    """What can be had at a cost: steps from one point to the next, and on to the edge."""
    left, right = axes.get_xlim()
    places = [point.costs[cost] for point in line]
    heights = [point.score.mean for point in line]
    look = {"color": "0.7", "linestyle": "--", "linewidth": 1, "drawstyle": "steps-post"}
    axes.plot([*places, right], [*heights, heights[-1]], zorder=1, **look)
    axes.set_xlim(left, right)


def _name_points(axes: Any, points: Sequence[Point], cost: str) -> None:
    """Write each name beside its mark, where it covers no other."""
    from matplotlib.patheffects import withStroke

    scale = 72 / axes.figure.dpi
    left, right = (scale * edge for edge in (axes.bbox.x0, axes.bbox.x1))
    marks = {
        point: tuple(scale * axes.transData.transform((point.costs[cost], point.score.mean)))
        for point in points
    }
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in marks.values()]
    for point in sorted(points, key=lambda p: -p.score.mean):
        x, y = marks[point]
        text = short(point.name, 30)
        boxes = [_box(text, x + dx, y + dy, dx < 0) for dx, dy in PLACES]
        inside = [i for i, box in enumerate(boxes) if left < box[0] and box[2] < right]
        free = [i for i in inside if not any(_meet(boxes[i], one) for one in taken)]
        chosen = free[0] if free else 0
        taken.append(boxes[chosen])
        dx, dy = PLACES[chosen]
        axes.annotate(
            text,
            (point.costs[cost], point.score.mean),
            xytext=(dx, dy),
            textcoords="offset points",
            fontsize=8,
            ha="right" if dx < 0 else "left",
            va="center",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            zorder=4,
            arrowprops=None if abs(dy) <= 9 else LEADER | {"relpos": (float(dx < 0), 0.5)},
        )


Box = tuple[float, float, float, float]


def _box(text: str, x: float, y: float, leftwards: bool) -> Box:
    width, height = LETTER[0] * len(text), LETTER[1]
    left = x - width if leftwards else x
    return left, y - height / 2, left + width, y + height / 2


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
