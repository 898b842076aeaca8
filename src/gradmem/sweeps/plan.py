"""A sweep as data: which learners, on which benchmarks, with which settings and seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count, islice, product
from typing import Any

from gradmem.benchmarks import lookup
from gradmem.files import plain
from gradmem.runs.experiment import Experiment
from gradmem.validation import non_negative_int, one_of, positive, positive_int

__all__ = [
    "FIRST_FINAL_SEED",
    "MODES",
    "SEARCHES",
    "Grid",
    "Sweep",
    "Tried",
    "check_grids",
    "final_numbers",
]

#: Setting → the values to try.
Grid = Mapping[str, Sequence[Any]]

#: Benchmark → learner → settings that are tried.
Tried = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]

#: How settings to try are found.
SEARCHES = {
    "grid": "all values of the grid with all",
    "optuna": "Optuna suggests some, from what is known of those before",
}

#: Trials of Optuna, if the caller does not say.
TRIALS = 50

#: What settings are chosen on.
MODES = {
    "validation": "data held out of the training sets",
    "first-tasks": "data held out of the first tasks' training sets",
    "test-as-published": "the test sets that are also reported, as the paper did",
}

#: The first seed of the runs with chosen settings: other seeds than those chosen with, so that
#: tasks, examples and first weights are new.
FIRST_FINAL_SEED = 1000

#: The most runs of a sweep. A grid of 20 kB can stand for thousands of millions.
MOST_RUNS = 100_000

#: What all runs of a sweep may have in common, beside what its benchmarks take.
_COMMON = ("shuffled", "every", "device")


@dataclass(frozen=True)
class Sweep:
    """Learner × benchmark × grid × seeds.

    Parameters
    ----------
    grids
        Benchmark → learner → setting → the values to try, all with all. What a grid does not name
        is as in the benchmark's settings for the learner.
    seeds
        Each setting is run with all of them.
    select
        What the best settings are chosen on: "validation" (`held_out` of each task's training
        examples), "first-tasks" (the same, on the first tasks only: cheaper), or
        "test-as-published" (the test sets; the numbers in the paper were chosen so).
    final_seeds
        Seeds of the runs with the chosen settings, on all training data and the test sets, which
        are what is reported. If left out: as many as `seeds`, from 1000 on; for
        "test-as-published" the same as `seeds`, since the paper reports the runs it chose from.
    held_out, first_tasks
        See `Experiment`; how much is held out, and how many are the first tasks.
    common
        What all runs have in common: what the benchmarks take (data, n_tasks, …), device, every.
    search
        How the settings to try are found: "grid", or "optuna" (see `gradmem.sweeps.trials`), which
        chooses numbers between the least and the greatest of a grid's values, other settings among
        the values.
    trials
        For "optuna": how many settings are tried of each learner; 50 if left out.

    Examples
    --------
    >>> sweep = Sweep({"mnist-rotations": {"single": {"lr": [0.01, 0.1]}, "gem": {"lr": [0.1]}}},
    ...               seeds=(0, 1), common={"data": "sample", "n_tasks": 2})
    >>> len(sweep.experiments())
    6
    >>> sweep.final_seeds
    (1000, 1001)
    >>> Sweep.from_json(sweep.to_json()) == sweep
    True
    """

    grids: Mapping[str, Mapping[str, Grid]]
    seeds: tuple[int, ...] = (0, 1, 2)
    select: str = "validation"
    final_seeds: tuple[int, ...] = ()
    held_out: float = 0.1
    first_tasks: int = 3
    common: Mapping[str, Any] = field(default_factory=dict)
    search: str = "grid"
    trials: int | None = None

    def __post_init__(self) -> None:
        one_of("select", self.select, MODES)
        if one_of("search", self.search, SEARCHES) == "optuna":
            trials = TRIALS if self.trials is None else positive_int("trials", self.trials)
            object.__setattr__(self, "trials", trials)
        elif self.trials is not None:
            raise ValueError('trials go with search="optuna": a grid is tried as a whole')
        object.__setattr__(self, "grids", check_grids(self.grids))
        object.__setattr__(self, "seeds", _seeds("seeds", self.seeds))
        final = self.final_seeds
        if not final:
            as_published = self.select == "test-as-published"
            fresh = (n for n in count(FIRST_FINAL_SEED) if n not in self.seeds)
            final = self.seeds if as_published else tuple(islice(fresh, len(self.seeds)))
        object.__setattr__(self, "final_seeds", _seeds("final_seeds", final))
        if positive("held_out", self.held_out) >= 1:
            raise ValueError(f"held_out must be below 1, got {self.held_out!r}")
        positive_int("first_tasks", self.first_tasks)
        if (runs := self._count()) > MOST_RUNS:
            raise ValueError(
                f"a sweep has at most {MOST_RUNS:,} runs; these grids and seeds make {runs:,}: try "
                "fewer values at a time"
            )
        if not isinstance(self.common, Mapping):
            raise TypeError(f"common must be name → value, got {self.common!r:.100}")
        options = [name for text in self.grids for name in lookup.find_benchmark(text).options]
        for name in self.common:
            one_of("a field in common", name, dict.fromkeys([*options, *_COMMON]))
        for benchmark, learners in self.grids.items():  # whatever else is wrong with the runs
            Experiment(benchmark, next(iter(learners)), **self.common, **self._choosing())

    @property
    def used_twice(self) -> set[int]:
        """Seeds that settings are chosen with and reported with; as published, that is as it is."""
        both = {*self.seeds} & {*self.final_seeds}
        return set() if self.select == "test-as-published" else both

    @property
    def others(self) -> list[str]:
        """The benchmarks and learners that are not gradmem's own."""
        return [name for name in _names(self.grids) if not lookup.is_own(name)]

    @property
    def device(self) -> str:
        return str(self.common.get("device", "cpu"))

    def settings(self, benchmark: str, learner: str) -> list[dict[str, Any]]:
        """All combinations of a grid's values."""
        grid = self.grids[benchmark][learner]
        return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]

    def experiments(self, tried: Tried | None = None) -> list[Experiment]:
        """The runs to choose from, in the order in which they are made fastest.

        These are all settings of the grids, or those in `tried`, with all seeds.

        Learners alternate, so that the time left can soon be estimated. On a GPU a setting's seeds
        follow each other and share recorded CUDA graphs; on a CPU all runs of a seed follow each
        other and share its data.
        """
        made = []
        for benchmark, learners in self.grids.items():
            some = [
                self.settings(benchmark, name) if tried is None else tried[benchmark][name]
                for name in learners
            ]
            rows = [[(name, s) for s in row] for name, row in zip(learners, some, strict=True)]
            turns = [row[i] for i in range(max(map(len, rows))) for row in rows if i < len(row)]
            if self.device.startswith("cuda"):
                runs = [(one, seed) for one in turns for seed in self.seeds]
            else:
                runs = [(one, seed) for seed in self.seeds for one in turns]
            made += [
                Experiment(benchmark, name, settings, seed=seed, **self.common, **self._choosing())
                for (name, settings), seed in runs
            ]
        return made

    def samples(self) -> list[Experiment]:
        """A run for each setting that may be tried; of a search, for each value of its grids."""
        if self.search == "grid":
            return self.experiments()
        tried = {
            benchmark: {learner: _in_turn(grid) for learner, grid in learners.items()}
            for benchmark, learners in self.grids.items()
        }
        return self.experiments(tried)

    def _choosing(self) -> dict[str, Any]:
        """The fields of `Experiment` that say what settings are chosen on."""
        if self.select == "test-as-published":
            return {}
        first = {"first_tasks": self.first_tasks} if self.select == "first-tasks" else {}
        return {"held_out": self.held_out, **first}

    def _count(self) -> int:
        """How many runs there are, counted without making them."""
        grids = [grid for learners in self.grids.values() for grid in learners.values()]
        tried = sum(self.trials or math.prod(map(len, grid.values())) for grid in grids)
        return tried * len(self.seeds) + len(grids) * len(self.final_seeds)

    def final(self, chosen: Iterable[tuple[str, str, Mapping[str, Any]]]) -> list[Experiment]:
        """The runs to report: chosen (benchmark, learner, settings), all data, the test sets."""
        return [
            Experiment(benchmark, learner, settings, seed=seed, **self.common)
            for benchmark, learner, settings in chosen
            for seed in self.final_seeds
        ]

    def extended(self, other: Sweep) -> Sweep:
        """This sweep with the values, seeds and trials of another; all else must be the same."""
        for name in ("select", "held_out", "first_tasks", "common", "search"):
            if plain(getattr(self, name)) != plain(getattr(other, name)):
                raise ValueError(
                    f"a sweep can be extended by values, seeds and trials, but its {name} is "
                    f"{getattr(self, name)!r}, got {getattr(other, name)!r}: choose another folder"
                )
        grids = {b: dict(learners) for b, learners in self.grids.items()}
        for benchmark, learners in other.grids.items():
            for learner, grid in learners.items():
                known = grids.setdefault(benchmark, {}).get(learner, grid)
                if set(known) != set(grid):
                    raise ValueError(
                        f"the grid of {learner} has {', '.join(known)}, got {', '.join(grid)}: "
                        "choose another folder for other settings"
                    )
                grids[benchmark][learner] = {
                    name: [*known[name], *(v for v in grid[name] if v not in known[name])]
                    for name in known
                }
        return replace(
            self,
            grids=grids,
            seeds=tuple(sorted({*self.seeds, *other.seeds})),
            final_seeds=tuple(sorted({*self.final_seeds, *other.final_seeds})),
            trials=max(self.trials or 0, other.trials or 0) or None,
        )

    def to_json(self) -> dict[str, Any]:
        """This sweep as plain data, for `sweep.json`."""
        return plain(asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sweep:
        """The sweep of which `to_json` made `value`, read from a file.

        A file makes no code run: benchmarks and learners that are not gradmem's must have been
        named or passed by this process's caller before.
        """
        known = [f.name for f in fields(cls)]
        for name in value:
            one_of("a field of a sweep", name, known)
        if "grids" not in value:
            raise ValueError(f"a sweep has grids, got only {', '.join(value)}")
        for name in _names(value["grids"]):
            if not lookup.is_given(name):
                raise ValueError(
                    f"it names {name!r:.100}, which is not gradmem's. Code that a file names is "
                    "run only if you name it, too: give the sweep's whole command again"
                )
        common = value.get("common", {})
        for name in common if isinstance(common, Mapping) else ():
            items = common[name] if isinstance(common[name], list) else [common[name]]
            if any(isinstance(item, dict | list) for item in items):
                raise ValueError(f"{name!r:.100} in common must be a number, a text or a list")
        return cls(**value)


def _in_turn(grid: Grid) -> list[dict[str, Any]]:
    """Settings in which each value occurs, not all with all."""
    first = {name: values[0] for name, values in grid.items()}
    return [first | {name: value} for name in grid for value in grid[name]] or [first]


def _names(grids: Any) -> Iterator[str]:
    """The benchmarks and learners in grids that may have any form."""
    for benchmark, learners in grids.items() if isinstance(grids, Mapping) else ():
        yield benchmark
        yield from learners if isinstance(learners, Mapping) else ()


def final_numbers(select: str, n: int) -> tuple[int, ...]:
    """The seeds of `n` final runs; for "test-as-published" those that were chosen from."""
    first = 0 if select == "test-as-published" else FIRST_FINAL_SEED
    return tuple(range(first, first + n))


def _seeds(name: str, seeds: Iterable[int]) -> tuple[int, ...]:
    if isinstance(seeds, str | Mapping) or not isinstance(seeds, Iterable):
        raise TypeError(f"{name} must be a list of numbers, got {seeds!r:.100}")
    numbers = tuple(non_negative_int("a seed", seed) for seed in seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{name} must be different numbers, at least one, got {list(numbers)!r:.100}"
        )
    return numbers


def check_grids(grids: Any) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """The grids as plain data; every name in them is known, and every setting has values."""
    if not isinstance(grids, Mapping) or not grids:
        raise ValueError(
            f"grids must be benchmark → learner → setting → values, got {grids!r:.100}"
        )
    found: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for what, learners in grids.items():
        benchmark = lookup.benchmark_reference(what)
        if not isinstance(learners, Mapping) or not learners:
            raise ValueError(f"the grid for {benchmark} must name a learner, got {learners!r:.100}")
        found[benchmark] = {}
        for who, grid in learners.items():
            learner = lookup.learner_reference(who)
            accepted = lookup.setting_parameters(lookup.find_learner(learner))
            allowed = [name for name in accepted if name != "seed"]
            if not isinstance(grid, Mapping):
                raise ValueError(
                    f"the grid of {learner} must be setting → values, got {grid!r:.100}"
                )
            for name, values in grid.items():
                one_of(f"a setting of {learner}", name, allowed)
                if not isinstance(values, list | tuple) or not values:
                    raise ValueError(
                        f"{learner}'s {name} must have a list of values to try, got {values!r:.100}"
                    )
                if plain(list(values)) != list(values):
                    raise ValueError(
                        f"{learner}'s {name} must have values that JSON can hold, got "
                        f"{values!r:.100}: other settings belong in the benchmark"
                    )
            found[benchmark][learner] = {name: list(values) for name, values in grid.items()}
    return found
