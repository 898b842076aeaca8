"""The board as cells: an entry in a column, which is a benchmark and a number of memories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradmem import published
from gradmem.benchmarks.data_sets import DATA_SETS, OTHER, SAMPLE
from gradmem.benchmarks.lookup import find_benchmark
from gradmem.board.entries import ENTRIES, Entry
from gradmem.runs.experiment import Experiment
from gradmem.sweeps import Sweep
from gradmem.sweeps.plan import final_numbers
from gradmem.validation import one_of, positive_int

__all__ = [
    "BENCHMARKS",
    "MEMORIES",
    "REPRODUCED",
    "Cell",
    "Column",
    "Conditions",
    "cells_of",
    "final_seeds",
    "memory_size",
]

#: Streams of other papers → memories. Learners that were published there are run as published, to
#: compare the numbers: columns with learners side by side they are not.
REPRODUCED: dict[str, tuple[int, ...]] = {
    "permuted-mnist": (5120, 500, 200),
    "rotated-mnist": (5120, 500, 200),
    "permuted-mnist-17": (4250,),
}

#: Benchmark → the memories that its columns have.
BENCHMARKS: dict[str, tuple[int, ...]] = {
    "mnist-rotations": (5120, 500, 200),
    "mnist-permutations": (5120, 500, 200),
    "mnist-many-permutations": (5120, 500, 200),
    "cifar100-incremental": (5120, 200),
    **REPRODUCED,
}

#: All of them, the largest first.
MEMORIES = tuple(sorted({m for sizes in BENCHMARKS.values() for m in sizes}, reverse=True))

#: Data set → seeds that settings are chosen with, and seeds of the runs that are reported.
SEEDS = {"mnist": (2, 5), "cifar100": (1, 3)}


@dataclass(frozen=True)
class Column:
    """A benchmark and how many examples a learner may remember; None for those that have none."""

    benchmark: str
    memories: int | None

    @property
    def slug(self) -> str:
        """A name for a file."""
        return self.benchmark if self.memories is None else f"{self.benchmark}-{self.memories}"


@dataclass(frozen=True)
class Conditions:
    """What all runs have in common: where the data are, where it is computed, how large it is.

    `n_tasks` and `examples_per_task` left out are the benchmark's; others make a trial, whose
    numbers are compared with nothing.
    """

    data: str | None = None
    device: str = "cpu"
    n_tasks: int | None = None
    examples_per_task: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_tasks", "examples_per_task"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        if self.n_tasks == 1:
            raise ValueError("n_tasks must be at least 2: there is no transfer in one task")

    def size(self, benchmark: str) -> dict[str, Any]:
        """The number of tasks and of examples of each."""
        usual = find_benchmark(benchmark).options
        usual = {
            **usual,
            **{k: v for k, v in published.settings().get(benchmark, {}).items() if k in usual},
        }
        names = ("n_tasks", "examples_per_task")
        return {name: getattr(self, name) or usual[name] for name in names}

    def is_trial(self, benchmark: str) -> bool:
        """Whether runs are of another size than the board's, or of other data."""
        whole = Conditions().size(benchmark)
        return self.size(benchmark) != whole or self.data in (SAMPLE, OTHER)

    def common(self, benchmark: str) -> dict[str, Any]:
        """The fields of `Experiment` that these conditions decide."""
        data = {} if self.data is None else {"data": self.data}
        return {**data, "device": self.device, **self.size(benchmark)}


@dataclass(frozen=True)
class Cell:
    """An entry in a column.

    Examples
    --------
    >>> cell = Cell(Column("mnist-rotations", 200), ENTRIES["gem"])
    >>> cell.slug, cell.grid(20)
    ('mnist-rotations-200-gem', {'memories': [10], 'lr': [0.03, 0.1], 'margin': [0.0, 0.5, 1.0]})
    """

    column: Column
    entry: Entry

    @property
    def slug(self) -> str:
        """A name for a file."""
        return f"{self.column.slug}-{self.entry.name.replace(' ', '-')}"

    def grid(self, n_tasks: int) -> dict[str, list[Any]]:
        """Setting → the values to try, with the memory."""
        grid = self.entry.grid(self.column.benchmark, self.column.memories) or {}
        return {**self._memory(n_tasks), **{name: list(values) for name, values in grid.items()}}

    def _memory(self, n_tasks: int) -> Mapping[str, list[int]]:
        if self.entry.memory is None or self.column.memories is None:
            return {}
        share = n_tasks if self.entry.memory == "memories" else 1
        return {self.entry.memory: [max(1, self.column.memories // share)]}

    @property
    def whole(self) -> Cell:
        """For an ablation the cell of the whole entry, elsewhere this one."""
        part_of = self.entry.part_of
        return self if part_of is None else Cell(self.column, ENTRIES[part_of])

    @property
    def is_searched(self) -> bool:
        """Whether there is more than one setting to try."""
        return math.prod(map(len, self.grid(1).values())) > 1

    def sweep(self, conditions: Conditions, seeds: int | None = None) -> Sweep:
        """The runs that settings are chosen from, and with them those to report.

        `seeds` is the number of the latter.
        """
        benchmark = self.column.benchmark
        grid = self.grid(conditions.size(benchmark)["n_tasks"])
        search, _ = SEEDS[DATA_SETS[benchmark]]
        return Sweep(
            {benchmark: {self.entry.learner: grid}},
            seeds=tuple(range(search)),
            final_seeds=final_seeds(benchmark, seeds),
            common={**conditions.common(benchmark), **self.entry.stream},
        )

    def settings(self, conditions: Conditions) -> list[dict[str, Any]]:
        """All settings to try."""
        return self.sweep(conditions).settings(self.column.benchmark, self.entry.learner)

    def final(
        self, settings: Mapping[str, Any], conditions: Conditions, seeds: int | None = None
    ) -> list[Experiment]:
        """The runs to report, with settings that were chosen for the whole entry."""
        own = (self.column.benchmark, self.entry.learner, {**settings, **self.entry.changes})
        return self.sweep(conditions, seeds).final([own])


def final_seeds(benchmark: str, seeds: int | None = None) -> tuple[int, ...]:
    """The seeds of the runs that are reported; the board's number of them if left out."""
    _, usual = SEEDS[DATA_SETS[benchmark]]
    return final_numbers("validation", usual if seeds is None else seeds)


def cells_of(
    benchmarks: Iterable[str] = BENCHMARKS,
    memories: Iterable[int] = MEMORIES,
    entries: Iterable[str] = ENTRIES,
) -> list[Cell]:
    """The cells of some columns and entries; learners without a memory are in one of each row.

    Examples
    --------
    >>> [cell.slug for cell in cells_of(["mnist-rotations"], [200, 500], ["single", "er"])]
    ['mnist-rotations-single', 'mnist-rotations-500-er', 'mnist-rotations-200-er']
    """
    sizes = [memory_size(m, MEMORIES) for m in memories]
    who = [ENTRIES[one_of("an entry", name, ENTRIES)] for name in entries]
    cells = []
    for benchmark in benchmarks:
        own = [m for m in BENCHMARKS[one_of("benchmark", benchmark, BENCHMARKS)] if m in sizes]
        for entry in who:
            columns: list[int | None] = [*own] if entry.memory is not None else [None] * bool(own)
            for m in columns:
                if entry.grid(benchmark, m) is not None:
                    cells.append(Cell(Column(benchmark, m), entry))
    return cells


def memory_size(memories: int, known: tuple[int, ...]) -> int:
    """`memories` if it is one of the known numbers; ValueError if not."""
    if memories not in known:
        raise ValueError(f"memories must be one of {', '.join(map(str, known))}, got {memories!r}")
    return memories
