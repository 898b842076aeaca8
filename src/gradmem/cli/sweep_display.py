"""A sweep on the terminal: how many runs, how long still, and the best so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from gradmem.benchmarks import lookup
from gradmem.cli.console import console, say
from gradmem.files import plain
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import Failure
from gradmem.sweeps import Choice, Event

__all__ = ["SweepDisplay", "choices_table", "say_failed", "stoppable"]

#: Seconds between lines where there is no terminal.
SECONDS_BETWEEN_LINES = 10.0


class SweepDisplay:
    """Called with each `Event`: live where there is a terminal, a line now and then where not."""

    def __init__(self) -> None:
        self.done = 0
        self._bars = Bars(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._tasks: dict[str, TaskID] = {}
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._last = time.monotonic()

    def __enter__(self) -> SweepDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """The sweep has got this far."""
        self.done += event.experiment is not None
        if self._live:
            self._show(self._live, event)
        else:
            self._tell(event)

    def _show(self, live: Live, event: Event) -> None:
        left = _left(event.seconds_left)
        if event.phase not in self._tasks:
            self._tasks[event.phase] = self._bars.add_task(event.phase, total=None, left="")
        bar = self._tasks[event.phase]
        self._bars.update(bar, total=event.total, completed=event.done, left=left)
        best = choices_table(event.best, "best so far")
        live.update(Group(self._bars, best) if event.best else self._bars)

    def _tell(self, event: Event) -> None:
        if isinstance(event.outcome, Failure) and event.experiment is not None:
            say(f"  {event.experiment.key} failed: {event.outcome.error}")
        now, at_an_end = time.monotonic(), event.experiment is None or event.done == event.total
        if not at_an_end and now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        left = _left(event.seconds_left)
        say(f"{event.phase}: {event.done} of {event.total} runs{left and ', ' + left}")
        if event.phase == "selection" and event.experiment is not None:
            so_far = "" if event.done == event.total else " so far"
            for choice in event.best:
                benchmark, learner, settings, acc, seeds = _cells(choice)
                say(f"  best{so_far}: {benchmark}, {learner}, {settings}: ACC {acc}, {seeds} seeds")


@contextmanager
def stoppable() -> Iterator[SweepDisplay]:
    """A display, in whose block Ctrl-C ends the command and says that it can go on."""
    with SweepDisplay() as display:
        try:
            yield display
        except KeyboardInterrupt:
            display.stop()
            say(f"Stopped after {display.done} runs, which are kept. The same command goes on.")
            raise typer.Exit(130) from None


def say_failed(failed: Sequence[tuple[Experiment, str]]) -> None:
    """Say which runs failed, and how they are run again."""
    for experiment, error in failed:
        say(f"{experiment.key} failed: {error}")
    if failed:
        say("What failed is missing below. --retry-failed runs it again.")


def choices_table(best: list[Choice], what: str) -> Table:
    """Settings with their ACC where they were chosen; `what` they are is in the title."""
    table = Table(title=f"{what}, on the data for choosing", title_justify="left")
    for heading in ("benchmark", "learner", "settings", "ACC", "seeds"):
        if heading in ("ACC", "seeds"):
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    for choice in best:
        table.add_row(*_cells(choice))
    return table


def _cells(choice: Choice) -> list[str]:
    settings = " ".join(f"{name}={value}" for name, value in plain(choice.settings).items())
    names = [lookup.shown(choice.benchmark), lookup.shown(choice.learner)]
    return [*names, settings, f"{choice.acc:.3f}", str(choice.seeds)]


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min left"
