"""Making the board's runs in a folder; interrupted, they can be gone on with.

All cells share the folder and its workers: first the runs to choose from, and the runs of cells in
which there is nothing to choose, then the chosen settings with other seeds on the test sets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradmem.board.plan import Cell, Conditions
from gradmem.runs.experiment import Experiment, settings_key
from gradmem.runs.read_folder import Run
from gradmem.sweeps import Event, Executor, Phase, Round, Store, check_settings, only_one
from gradmem.sweeps.executors import Elsewhere
from gradmem.sweeps.selection import choose

__all__ = ["Searched", "make_cells"]


@dataclass(frozen=True)
class Searched:
    """What a cell's settings were chosen from."""

    seeds: tuple[int, ...]
    held_out: float
    """The part of the training examples that ACC was measured on."""
    tried: tuple[tuple[dict[str, Any], tuple[float | None, ...]], ...]
    """Settings, and their ACC with each seed; None where the run failed."""


#: Called with a cell, what its settings were chosen from, and its finished runs.
OnFinished = Callable[[Cell, Searched | None, list[Run]], object]


def make_cells(
    out: str | os.PathLike[str],
    cells: Sequence[Cell],
    conditions: Conditions,
    executor: Executor,
    seeds: int | None = None,
    retry_failed: bool = False,
    on_event: Callable[[Event], None] | None = None,
    on_finished: OnFinished | None = None,
) -> list[tuple[Experiment, str]]:
    """Choose each cell's settings and run them, where the folder lacks it.

    It can be interrupted or killed and called again. `seeds` is the number of runs to report of a
    cell; `retry_failed` and `on_event` are those of `gradmem.sweeps.run_sweep`. `on_finished` is
    called for a cell whenever one more of its runs to report is there.

    Returns what failed, with its error.
    """
    board = _Board(Path(out), conditions, seeds, on_event, on_finished)
    wholes = dict.fromkeys(cell.whole for cell in cells)
    searched = {cell: cell.sweep(conditions).experiments() for cell in wholes if cell.is_searched}
    fixed = [cell for cell in cells if cell.whole not in searched]
    for cell in fixed:
        (settings,) = cell.settings(conditions)
        board.plan(cell, settings)
    # What takes longest comes first: learners with nothing to choose are the slow ones.
    every = board.planned() + [run for runs in searched.values() for run in runs]
    check_settings(every, isinstance(executor, Elsewhere))
    with only_one(board.out, "board"):
        failed = board.make("search", every, executor, retry_failed)
        chosen = {cell: board.choose(cell, planned) for cell, planned in searched.items()}
        for cell in cells:
            if (found := chosen.get(cell.whole)) is not None:
                board.plan(cell, found)
        failed |= board.make("final", board.planned(), executor, retry_failed)
        for cell in cells:
            board.tell(cell)
    return list(failed.values())


class _Board:
    """A folder with the runs of all cells."""

    def __init__(
        self,
        out: Path,
        conditions: Conditions,
        seeds: int | None,
        on_event: Callable[[Event], None] | None,
        on_finished: OnFinished | None,
    ) -> None:
        self.out, self.conditions, self.seeds = out, conditions, seeds
        self.on_event, self.on_finished = on_event, on_finished
        self.store = Store(out)
        self.final: dict[Cell, list[Experiment]] = {}
        self.searched: dict[Cell, Searched] = {}

    def plan(self, cell: Cell, settings: dict[str, Any]) -> None:
        """Plan the runs to report of a cell."""
        self.final[cell] = cell.final(settings, self.conditions, self.seeds)

    def planned(self) -> list[Experiment]:
        return [run for runs in self.final.values() for run in runs]

    def make(
        self, name: str, runs: list[Experiment], executor: Executor, retry_failed: bool
    ) -> dict[str, tuple[Experiment, str]]:
        """Make runs; those that failed, with their errors."""
        cells: dict[str, list[Cell]] = {}
        for cell, found in self.final.items():
            for run in found:
                cells.setdefault(run.key, []).append(cell)

        def report(event: Event) -> None:
            if event.experiment is not None:
                for cell in cells.get(event.experiment.key, ()):
                    self.tell(cell)
            if self.on_event:
                self.on_event(event)

        once = list({run.key: run for run in runs}.values())
        phase = Phase(self.store, executor, retry_failed, report)
        return phase.make(name, [Round(once)]) if once else {}

    def choose(self, cell: Cell, planned: list[Experiment]) -> dict[str, Any] | None:
        """The best settings of a cell whose search is done; None if none of them finished."""
        sweep = cell.sweep(self.conditions, self.seeds)
        tried: dict[str, tuple[dict[str, Any], list[float | None]]] = {}
        for one in planned:
            found = self.store.outcome(one)
            acc = found.result["acc"] if isinstance(found, Run) else None
            tried.setdefault(settings_key(one.settings), (one.settings, []))[1].append(acc)
        self.searched[cell] = Searched(
            sweep.seeds, sweep.held_out, tuple((s, tuple(accs)) for s, accs in tried.values())
        )
        best = choose(self.store, planned, len(sweep.seeds))
        return best[0].settings if best else None

    def tell(self, cell: Cell) -> None:
        """Hand on the runs to report that are there."""
        keys = [run.key for run in self.final.get(cell, ())]
        runs = [self.store.run(key) for key in keys if self.store.is_finished(key)]
        if runs and self.on_finished is not None:
            self.on_finished(cell, self.searched.get(cell), runs)
