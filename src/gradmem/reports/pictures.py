"""Pictures of runs for papers, each as PNG and PDF: R, curves, bars, ACC against memory."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.reports.published import PUBLISHED, published, published_first_task
from gradmem.reports.styles import VARIANTS, Style, Variant, paler, styles
from gradmem.reports.summary import MemoryLine, Row, bounds, leading, memory_lines, seeds_text

__all__ = ["draw_bars", "draw_first_task", "draw_pictures"]

#: Rows of one benchmark that a picture can hold, and matrices drawn. The page has all of them.
LIMIT = 8

METRICS = ("acc", "bwt", "fwt")

#: For papers and for screens.
FORMATS = ("png", "pdf")

#: A published curve, under the measured one of its colour.
DOTTED: dict[str, Any] = {"linestyle": (0, (1, 1.2)), "linewidth": 1.1, "alpha": 0.8, "zorder": 1}

#: Published values among the bars.
DIAMONDS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "d",
    "markersize": 5,
    "markerfacecolor": "white",
    "markeredgecolor": "black",
    "zorder": 3,
}


def draw_pictures(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Draw each benchmark's matrices R, first task, bars and, where it varies, memory.

    Of a benchmark with many rows, every learner's best ones are drawn. The folder is made if need
    be; returns the files written.
    """
    folder = Path(folder)
    look = styles(row.learner for row in rows)
    written = []
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        every = [row for row in rows if row.benchmark == benchmark]
        members = leading(every, LIMIT)
        for row in members:
            written += _matrix(row, folder)
        written += draw_first_task(benchmark, members, folder, look)
        written += draw_bars(benchmark, members, folder, look)
        lines = memory_lines(every)
        if lines:
            lines.sort(key=lambda line: -max(row.estimate("acc").mean for row in line.rows))
            written += _memory(benchmark, lines[:LIMIT], look, folder)
    return written


def _matrix(row: Row, folder: Path) -> list[Path]:
    """R as a heat map: a row per task learned, a column per task tested."""
    R = row.R
    n_rows, T = R.shape
    flat = n_rows * 2 < T
    figure, axes = _figure(width=5.6, height=4.4 * n_rows / T + (2.1 if flat else 0.9))
    low, high = bounds([row]) or (R.min(), R.max())
    image = axes.imshow(R, vmin=low, vmax=high, cmap="cividis", aspect="equal")
    title = f"{_short(row.name)} on {_short(row.benchmark)}: ACC {row.text('acc')}"
    axes.set_title(title, wrap=True)
    axes.set_xlabel("tested on task")
    axes.set_ylabel("after learning task" if n_rows > 4 else "after")
    axes.set_xticks(_ticks(T), labels=[str(i + 1) for i in _ticks(T)])
    learned = row.runs[0].result.get("learned") or range(n_rows)
    after = ["all" if learned[i] is None else str(learned[i] + 1) for i in _ticks(n_rows)]
    axes.set_yticks(_ticks(n_rows), labels=after)
    if T <= 10:
        for (i, j), value in np.ndenumerate(R):
            colour = "black" if value > (low + high) / 2 else "white"
            # Three digits: 1520, not 1.52e+03.
            text = f"{value:.2f}" if (low, high) == (0, 1) else f"{float(f'{value:.3g}'):g}"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
    bar = {"orientation": "horizontal", "aspect": 40} if flat else {"fraction": 0.046}
    figure.colorbar(image, ax=axes, label=_short(row.runs[0].measure), pad=0.03, **bar)
    return _save(figure, folder, f"R-{_slug(row.benchmark)}-{_slug(row.name)}")


def draw_first_task(
    benchmark: str,
    rows: Sequence[Row],
    folder: str | Path,
    look: dict[str, Style],
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """The test score on the first task as more of the continuum is observed (Figure 1, right)."""
    figure, axes = _figure(width=7, height=4.2)
    for row in rows:
        examples, scores = row.first_task
        axes.plot(
            examples,
            scores,
            markevery=max(1, len(examples) // 20),
            markersize=5,
            **_line(look[row.learner], _variant(row, rows)),
            label=_short(row.name),
        )
    known = [(row, values) for row in rows if (values := published_first_task(row))]
    for row, values in known:
        x = np.linspace(0, row.first_task[0][-1], len(values))
        axes.plot(x, values, color=look[row.learner].colour, **DOTTED)
    if known:
        axes.plot([], [], color="black", label=PUBLISHED, **DOTTED)
    axes.set_title(f"First task of {_short(benchmark)}, as more tasks are learned", wrap=True)
    axes.set_xlabel("examples observed")
    axes.set_ylabel(f"{_short(rows[0].runs[0].measure, 40)} on the first task")
    axes.set_ylim(bounds(rows))
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    return _save(figure, folder, f"first-task-{_slug(benchmark)}", formats)


def draw_bars(
    benchmark: str,
    rows: Sequence[Row],
    folder: str | Path,
    look: dict[str, Style],
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """ACC, BWT and FWT side by side, as in the paper's Figure 1."""
    figure, axes = _figure(width=7, height=3.6)
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        x = np.arange(len(METRICS)) + (i - (len(rows) - 1) / 2) * width
        _bars_of_row(axes, x, width, row, look[row.learner], _variant(row, rows))
    if any(published(row) for row in rows):
        axes.plot([], [], label=PUBLISHED, **DIAMONDS)
    axes.axhline(0, color="black", linewidth=0.8)
    if rows[0].score != "accuracy":
        axes.set_ylabel(_short(rows[0].score, 40))
    axes.set_xticks(range(len(METRICS)), labels=[name.upper() for name in METRICS])
    axes.set_xlim(-0.5, len(METRICS) - 0.5)
    seeds = seeds_text(rows)
    spread = f", {seeds} and 95% interval" if seeds else ""
    axes.set_title(f"{_short(benchmark)}{spread}", wrap=True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    _legend(figure, axes)
    return _save(figure, folder, f"bars-{_slug(benchmark)}", formats)


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
        label=_short(row.name),
    )
    halves = [_or_zero(estimate.half_width) for estimate in estimates]
    if any(halves):
        _whiskers(axes, x, means, halves, min(3, 20 * width))
    if known := published(row):
        axes.plot(x, list(known.values()), **DIAMONDS)


def _memory(
    benchmark: str, lines: Sequence[MemoryLine], look: dict[str, Style], folder: Path
) -> list[Path]:
    """ACC against examples remembered."""
    figure, axes = _figure(width=7, height=3.6)
    for line in lines:
        estimates = [row.estimate("acc") for row in line.rows]
        axes.errorbar(
            [row.memory for row in line.rows],
            [estimate.mean for estimate in estimates],
            yerr=[_or_zero(estimate.half_width) for estimate in estimates],
            markersize=5,
            **_line(look[line.learner], _variant(line, lines)),
            capsize=3,
            label=_short(line.name),
        )
    axes.set_xscale("log", base=10)
    sizes = sorted({row.memory or 0 for line in lines for row in line.rows})
    if len(sizes) <= 8:
        axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
        axes.minorticks_off()
    axes.set_title(f"ACC against memory on {_short(benchmark)}", wrap=True)
    axes.set_xlabel("examples remembered in all")
    score = lines[0].rows[0].score
    axes.set_ylabel("ACC" if score == "accuracy" else f"ACC ({_short(score, 40)})")
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    return _save(figure, folder, f"acc-memory-{_slug(benchmark)}")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # Figure itself, not pyplot: no window system is touched and nothing stays open.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    return figure, figure.add_subplot()


def _variant(one: Row | MemoryLine, among: Sequence[Row | MemoryLine]) -> Variant:
    """What tells a row or line from the others of its learner."""
    alike = [other for other in among if other.learner == one.learner]
    return VARIANTS[alike.index(one) % len(VARIANTS)]


def _line(style: Style, variant: Variant) -> dict[str, Any]:
    """How a learner's line looks, for Matplotlib."""
    return {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": variant.line,
        "markerfacecolor": "white" if variant.open else style.colour,
        "markeredgecolor": "black" if variant.dotted else style.colour,
    }


def _whiskers(axes: Any, x: Any, means: Any, halves: Any, cap: float) -> None:
    """Intervals in black with a white rim, to be seen on any bar."""
    from matplotlib.patheffects import withStroke

    drawn = axes.errorbar(
        x, means, halves, fmt="none", ecolor="black", elinewidth=1, capsize=cap, zorder=2.5
    )
    _, caps, lines = drawn.lines
    for part in (*caps, *lines):
        part.set_path_effects([withStroke(linewidth=3, foreground="white")])


def _legend(figure: Any, axes: Any) -> None:
    """Below the axes, where long names take nothing from them; what was published comes last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: entry[1] == PUBLISHED)
    handles, names = zip(*entries, strict=True)
    renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    most = min(len(names), 6)
    # As many columns as fit; if not even one does, smaller letters.
    for columns, size in [*((n, 10) for n in range(most, 0, -1)), (1, 8), (1, 6)]:
        legend = figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=size,
            handlelength=3,
        )
        if legend.get_window_extent(renderer).width <= figure.bbox.width:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(names) // columns))


def _save(
    figure: Any, folder: str | Path, name: str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in formats]
    for path in paths:
        # Without a date in it, the same runs make the same file.
        date = {"CreationDate": None} if path.suffix == ".pdf" else None
        figure.savefig(path, metadata=date)
    return paths


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def _short(name: str, length: int = 90) -> str:
    name = name if len(name) <= length else f"{name[: length - 1]}…"
    name = f" {name}" if name.startswith("_") else name  # Matplotlib's legends leave these out
    return name.replace("$", r"\$")  # between dollars Matplotlib expects a formula


def _ticks(n: int) -> range:
    return range(0, n, max(1, -(-n // 10)))


def _slug(name: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9.=]+", "-", name).strip("-")
    if len(slug) <= 80 and name.isascii():
        return slug
    # Names that are cut, or lose letters that are not ASCII, stay different by a hash.
    return f"{slug[:70]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
