"""Making the board's runs in a folder; interrupted, they can be gone on with.

All cells share the folder and its workers: first the runs to choose from, and the runs of cells in
which there is nothing to choose, then the chosen settings with other seeds on the test sets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gradmem.board.kept import Kept, Searched
from gradmem.board.plan import Cell, Conditions
from gradmem.runs.experiment import Experiment, settings_key
from gradmem.runs.read_folder import Run
from gradmem.sweeps import Event, Executor, Phase, Round, Store, check_settings, only_one
from gradmem.sweeps.executors import Elsewhere
from gradmem.sweeps.selection import choose

__all__ = ["make_cells"]


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
    kept: Iterable[Kept] = (),
) -> list[tuple[Experiment, str]]:
    """Choose each cell's settings and run them, where the folder lacks it.

    It can be interrupted or killed and called again. `seeds` is the number of runs to report of a
    cell; `retry_failed` and `on_event` are those of `gradmem.sweeps.run_sweep`. `on_finished` is
    called for a cell whenever one more of its runs to report is there.

    `kept` are results from elsewhere, of the size and data of `conditions`. Of a cell whose search
    is among them, nothing is searched again, and seeds that they have are not run again: but for
    those made with other settings than are planned now, and searches in which runs failed if
    `retry_failed`.

    Returns what failed, with its error.
    """
    board = _Board(Path(out), conditions, seeds, on_event, on_finished, kept)
    to_search: dict[Cell, list[Experiment]] = {}
    for cell in dict.fromkeys(cell.whole for cell in cells):
        if not cell.is_searched:
            (board.chosen[cell],) = cell.settings(conditions)
        elif not board.chose_before(cell, retry_failed):
            to_search[cell] = cell.sweep(conditions).experiments()
    board.plan(cells)
    # What takes longest comes first: learners with nothing to choose are the slow ones.
    every = board.planned() + [run for runs in to_search.values() for run in runs]
    check_settings(every, isinstance(executor, Elsewhere))
    with only_one(board.out, "board"):
        failed = board.make("search" if to_search else "final", every, executor, retry_failed)
        for cell, planned in to_search.items():
            board.choose(cell, planned)
        board.plan(cells)
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
        kept: Iterable[Kept],
    ) -> None:
        self.out, self.conditions, self.seeds = out, conditions, seeds
        self.on_event, self.on_finished = on_event, on_finished
        self.store = Store(out)
        self.kept = {one.slug: one for one in kept}
        self.chosen: dict[Cell, dict[str, Any]] = {}
        self.final: dict[Cell, list[Experiment]] = {}
        self.searched: dict[Cell, Searched] = {}

    def chose_before(self, cell: Cell, retry_failed: bool) -> bool:
        """Choose what was chosen for the kept result, if the same was tried for it."""
        one = self.kept.get(cell.slug)
        found = None if one is None else one.searched
        if one is None or found is None:
            return False
        sweep = cell.sweep(self.conditions)
        tried = {settings_key(settings): accs for settings, accs in found.tried}
        planned = {settings_key(run.settings) for run in sweep.experiments()}
        if (found.seeds, found.held_out, {*tried}) != (sweep.seeds, sweep.held_out, planned):
            return False
        if retry_failed and any(None in accs for accs in tried.values()):
            return False
        self.chosen[cell], self.searched[cell] = one.about["settings"], found
        return True

    def plan(self, cells: Sequence[Cell]) -> None:
        """Plan the runs to report of cells whose settings are chosen, but for those kept."""
        for cell in cells:
            if (settings := self.chosen.get(cell.whole)) is not None:
                runs = cell.final(settings, self.conditions, self.seeds)
                one = self.kept.get(cell.slug)
                self.final[cell] = [run for run in runs if one is None or not one.has(run)]

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

    def choose(self, cell: Cell, planned: list[Experiment]) -> None:
        """Choose the best settings of a cell whose search is done, unless none of them finished."""
        sweep = cell.sweep(self.conditions, self.seeds)
        tried: dict[str, tuple[dict[str, Any], list[float | None]]] = {}
        for one in planned:
            found = self.store.outcome(one)
            acc = found.result["acc"] if isinstance(found, Run) else None
            tried.setdefault(settings_key(one.settings), (one.settings, []))[1].append(acc)
        self.searched[cell] = Searched(
            sweep.seeds, sweep.held_out, tuple((s, tuple(accs)) for s, accs in tried.values())
        )
        if best := choose(self.store, planned, len(sweep.seeds)):
            self.chosen[cell] = best[0].settings

    def tell(self, cell: Cell) -> None:
        """Hand on the runs to report that are there."""
        keys = [run.key for run in self.final.get(cell, ())]
        runs = [self.store.run(key) for key in keys if self.store.is_finished(key)]
        if runs and self.on_finished is not None:
            self.on_finished(cell, self.searched.get(cell), runs)
