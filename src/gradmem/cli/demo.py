"""`gradmem demo`: three learners on ten tasks, live, and a page at the end."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from gradmem.cli import options
from gradmem.cli.console import console, say
from gradmem.cli.report import write_report
from gradmem.evaluation import Progress
from gradmem.evaluation.result import Matrix
from gradmem.reports.styles import Style, styles
from gradmem.runs.compare import plan_runs, run_into

__all__ = ["demo_command"]

#: Learners and their settings; the rest is the benchmark's.
LEARNERS = {"single": {"lr": 0.1}, "ewc": {}, "gem": {}}
TASKS, EXAMPLES = 10, 500
#: What the table's columns are.
METRICS = (
    "ACC: mean accuracy on all tasks at the end. BWT: how later tasks changed it on earlier ones "
    "(below 0: forgotten).\nFWT: how much better a task was known before its turn than without "
    "any training."
)
#: Rows of the curves' chart, and columns per task.
HEIGHT, STEP = 11, 3
#: From a score of 0 to 1, in red, green and blue.
SCALE = ((68, 1, 84), (49, 104, 142), (53, 183, 121), (253, 231, 37))


def demo_command(
    out: Annotated[Path, options.where("Folder for the results.")] = Path("demo"),
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Whether the page is opened in a browser.")
    ] = True,
) -> None:
    """See it work: three learners on ten rotations of the bundled digits, in under a minute.

    SGD ("single") forgets, GEM far less. Nothing is downloaded.
    """
    torch.set_num_threads(
        1
    )  # enough for a small network; several wait for each other on a busy CPU
    settings = dict(LEARNERS)
    size = {"n_tasks": TASKS, "examples_per_task": EXAMPLES, "data": "sample"}
    planned = plan_runs("mnist-rotations", [*settings], [0], settings, **size)
    with View() as view:
        for name, experiment in planned.items():
            view.start(experiment.learner)
            run_into(out / name, experiment, [view], overwrite=True)
    write_report([out / name for name in planned], out, brief=True)
    page = (out / "report.html").absolute()
    say(
        f"{METRICS}\n\n"
        f"Accuracy on the first task, when it was learned, at its best, and after all {TASKS}:"
    )
    for name, R in view.rows.items():
        shown = "single (plain SGD)" if name == "single" else name
        say(f"  {shown:<18}  {R[0, 0]:.2f} → {R[:, 0].max():.2f} → {R[-1, 0]:.2f}")
    say(f"Every chart is on the page: {page}")
    if open_page and console.is_terminal and _has_windows():
        webbrowser.open(page.as_uri())


class View:
    """A callback that shows R row by row, and the first task's curve of every learner."""

    def __init__(self) -> None:
        self.rows: dict[str, Matrix] = {}
        self.now = ""
        self.live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> View:
        if console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def start(self, learner: str) -> None:
        """The next learner's run begins."""
        self.now = learner
        self.rows[learner] = np.zeros((0, TASKS))
        if not console.is_terminal:
            numbers = " ".join(f"{j + 1:>4}" for j in range(TASKS))
            say(f"{learner}: accuracy on every task\n  {'on task':<15}{numbers}")

    def on_task(self, progress: Progress) -> None:
        """A row of R is there: show it."""
        assert progress.partial is not None
        self.rows[self.now] = progress.partial.R
        if console.is_terminal:
            self.live.update(self.picture(), refresh=True)
        else:
            scores = " ".join(f"{score:.2f}" for score in progress.partial.R[-1])
            say(f"  after task {progress.task + 1:>2}: {scores}")

    def picture(self) -> Group:
        """All that is shown."""
        title = f"{self.now}: accuracy on every task (columns), after each task (rows)"
        charts = Columns(
            [
                Panel(matrix(self.rows[self.now]), title="R", padding=(0, 1)),
                Panel(curves(self.rows), title="first task's accuracy", padding=(0, 1)),
            ]
        )
        return Group(Text(title, style="bold"), charts, legend(self.rows))


def matrix(R: Matrix) -> Text:
    """R as coloured cells, in per cent; rows that are still to come are empty."""
    text = Text.assemble(("after  " + "".join(f"{j + 1:>4}" for j in range(TASKS)) + "\n", "dim"))
    for i in range(TASKS):
        text.append(f"{i + 1:>5}  ", style="dim")
        for score in R[i] if i < len(R) else ():
            red, green, blue = colour(float(score))
            front = "rgb(0,0,0)" if green > 140 else "rgb(255,255,255)"
            text.append(f"{100 * score:>4.0f}", f"{front} on rgb({red},{green},{blue})")
        text.append("\n")
    return text


def colour(score: float) -> tuple[int, ...]:
    """Red, green and blue of a score from 0 to 1.

    Examples
    --------
    >>> colour(0.0), colour(1.0)
    ((68, 1, 84), (253, 231, 37))
    """
    place = min(max(score, 0.0), 1.0) * (len(SCALE) - 1)
    i = min(int(place), len(SCALE) - 2)
    return tuple(round(a + (b - a) * (place - i)) for a, b in zip(*SCALE[i : i + 2], strict=True))


def curves(rows: dict[str, Matrix]) -> Text:
    """The first column of every learner's R against the tasks learned, as a chart of characters."""
    look = styles(rows)
    cells = {}
    for name, R in rows.items():
        for i, score in enumerate(R[:, 0] if len(R) else ()):
            cells[round((1 - score) * (HEIGHT - 1)), i * STEP + 1] = look[name]
    text = Text()
    for y in range(HEIGHT):
        mark = 1 - y / (HEIGHT - 1)
        text.append(f"{mark:.1f} " if y % 5 == 0 else "    ", style="dim")
        text.append("┤" if y % 5 == 0 else "│", style="dim")
        for x in range(STEP * TASKS):
            style = cells.get((y, x))
            text.append(style.glyph if style else " ", ink(style) if style else None)
        text.append("\n")
    return text


def legend(rows: dict[str, Matrix]) -> Text:
    """Which mark is whose, and where its curve is."""
    text = Text()
    for name, style in styles(rows).items():
        last = f" {rows[name][-1][0]:.2f}" if len(rows[name]) else ""
        text.append(f"{style.glyph} {name}{last}   ", ink(style))
    return text


def ink(style: Style) -> str:
    """A learner's colour on a terminal, light or dark: GEM's black is the terminal's own ink."""
    return "bold" if style == styles(["gem"])["gem"] else f"bold {style.colour}"


def _has_windows() -> bool:
    """Whether a browser would have a window of its own."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
