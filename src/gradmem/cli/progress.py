"""A run's progress on the terminal: live where there is one, a line now and then where not."""

from __future__ import annotations

from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from gradmem.cli.console import console, say
from gradmem.evaluation import Progress

__all__ = ["Display"]


class Display:
    """A callback that shows runs one after another: task, examples/s, ACC so far, time left."""

    def __init__(self) -> None:
        self.live = console.is_terminal
        self.bars = Bars(
            TextColumn("[bold]{task.description:<22}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            console=console,
            disable=not self.live,
        )

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def start(self, name: str) -> None:
        """A new run begins."""
        self.name = name
        self.bar = self.bars.add_task(name, total=None, facts="reading data")
        if not self.live:
            say(name)

    def on_resume(self, progress: Progress) -> None:
        """Say from where a run that was stopped goes on."""
        self.on_batch(progress)
        self._note(
            f"goes on from its checkpoint: task {progress.task + 1} of {progress.n_tasks}, "
            f"{progress.examples:,} of {progress.n_examples:,} examples"
        )

    def on_batch(self, progress: Progress) -> None:
        """Show how far the run is, after a mini-batch."""
        facts, n = describe(progress), progress.n_examples
        self.bars.update(self.bar, total=n, completed=progress.examples, facts=facts)

    def on_task(self, progress: Progress) -> None:
        """Show how far the run is, after a task; without a terminal, five times in a run."""
        self.on_batch(progress)
        if not self.live and (progress.task + 1) % max(1, progress.n_tasks // 5) == 0:
            say(f"  {describe(progress)}")

    def finish(self, facts: str) -> None:
        """Show a run that need not be made as done, with the reason."""
        self.bars.update(self.bar, total=1, completed=1, facts=escape(facts))
        if not self.live:
            say(f"  {facts}")

    def stop(self) -> None:
        """The run was stopped; who stopped it says the rest."""
        self.bars.update(self.bar, facts="stopped")

    def _note(self, facts: str) -> None:
        """A line about the run that stays, above the bars where there are any."""
        say(f"{self.name} {facts}" if self.live else f"  {facts}")

    def fail(self, reason: str) -> None:
        """The run ended without a result."""
        self.bars.update(self.bar, facts=f"[red]failed: {escape(reason)}")
        if not self.live:
            say(f"  failed: {reason}")


def describe(progress: Progress) -> str:
    """One line about how far a run is."""
    rate = progress.examples / progress.seconds if progress.seconds > 0 else 0.0
    left = (progress.n_examples - progress.examples) / rate if rate else 0.0
    acc = "  –  " if progress.acc is None else f"{progress.acc:.3f}"
    done = progress.examples == progress.n_examples
    time = f"{progress.seconds:4.0f} s     " if done else f"{left:4.0f} s left"
    return (
        f"task {progress.task + 1:>2}/{progress.n_tasks}  {rate:>6,.0f} examples/s  "
        f"ACC {acc}  {time}"
    )
