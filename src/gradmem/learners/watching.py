"""How far a learner is in a stream without an end, on the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from gradmem.trees import Tree

__all__ = ["watched"]


def watched(stream: Iterable[tuple[Tree, ...]], learner: Any) -> Iterator[tuple[Tree, ...]]:
    """The stream as it is, with a line about it where there is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    line = (SpinnerColumn(), TextColumn("{task.fields[facts]}"))
    console = Console(stderr=True)
    start, before = time.perf_counter(), learner.examples
    with Progress(*line, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, facts="waiting for data")
        for item in stream:
            yield item
            seconds = max(1e-9, time.perf_counter() - start)
            examples = learner.examples - before
            t = item[1] if len(item) == 3 else learner.tasks[-1].t
            facts = f"task {t}  {examples:,} examples  {examples / seconds:,.0f} examples/s"
            bar.update(task, facts=facts)
