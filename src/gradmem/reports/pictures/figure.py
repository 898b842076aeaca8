"""What all pictures share: the figure and its file, the legend, names, lines and marks."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradmem.files import replace_whole
from gradmem.reports.published import PUBLISHED
from gradmem.reports.styles import VARIANTS, Style, Variant
from gradmem.reports.summary import MemoryLine, Row
from gradmem.runs.read_folder import printable

__all__ = [
    "FORMATS",
    "add_legend",
    "line_look",
    "new_figure",
    "or_zero",
    "save",
    "short",
    "slug",
    "task_names",
    "ticks",
    "variant_of",
]

#: For papers and for screens.
FORMATS = ("png", "pdf")


#: Tasks with longer names are called by their numbers.
LONGEST_TASK = 12


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    # Figure itself, not pyplot: no window system is touched and nothing stays open.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    return figure, figure.add_subplot()


def variant_of(one: Row | MemoryLine, among: Sequence[Row | MemoryLine]) -> Variant:
    """What tells a row or line from the others of its learner."""
    alike = [other for other in among if other.learner == one.learner]
    return VARIANTS[alike.index(one) % len(VARIANTS)]


def line_look(style: Style, variant: Variant) -> dict[str, Any]:
    """How a learner's line looks, for Matplotlib."""
    return {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": variant.line,
        "markerfacecolor": "white" if variant.open else style.colour,
        "markeredgecolor": "black" if variant.dotted else style.colour,
    }


def add_legend(figure: Any, axes: Any) -> None:
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


def save(
    figure: Any, folder: str | Path, name: str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write the figure once per format, each file whole or not at all; returns their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in formats]
    for path in paths:
        # Without a date in it, the same runs make the same file.
        date = {"CreationDate": None} if path.suffix == ".pdf" else None
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:], metadata=date)
        replace_whole(path, content.getvalue())
    return paths


def or_zero(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def short(name: str, length: int = 90) -> str:
    name = name if len(name) <= length else f"{name[: length - 1]}…"
    name = f" {name}" if name.startswith("_") else name  # Matplotlib's legends leave these out
    return name.replace("$", r"\$")  # between dollars Matplotlib expects a formula


def ticks(n: int) -> range:
    return range(0, n, max(1, -(-n // 10)))


def task_names(row: Row) -> list[str]:
    """The tasks' own names where all runs have the same short ones, else their numbers.

    `web/numbers.js` does the same for the page.
    """
    known = [[str(label) for label in run.result.get("tasks") or []] for run in row.runs]
    names = [printable(label).removeprefix("task ") for label in known[0]]
    T = row.R.shape[1]
    telling = (
        all(one == known[0] for one in known)
        and len(set(names)) == len(names) == T
        and all(len(name) <= LONGEST_TASK for name in names)
        and not all(re.fullmatch(r"[0-9]+", name) for name in names)
    )
    return names if telling else [str(j + 1) for j in range(T)]


def slug(name: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9.=]+", "-", name).strip("-")
    if len(slug) <= 80 and name.isascii():
        return slug
    # Names that are cut, or lose letters that are not ASCII, stay different by a hash.
    return f"{slug[:70]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
