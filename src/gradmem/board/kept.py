"""Results as small files to keep: one per cell of the board, with every setting that was tried."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradmem.board.plan import BENCHMARKS, Cell, Column, Conditions, memory_size
from gradmem.files import check_texts, misfit, plain, read_json, write_whole
from gradmem.reports import Estimate
from gradmem.runs.experiment import Experiment, settings_key
from gradmem.runs.read_folder import MAX_NUMBER, Run
from gradmem.validation import one_of

__all__ = ["Kept", "Searched", "keep", "load"]

#: Digits of accuracies, after the point: MNIST's test sets have 10,000 images.
DIGITS = 4

#: What a line about a run holds; costs and bytes are whole numbers.
METRICS = ("acc", "bwt", "fwt")
COSTS = ("steps", "example_gradients", "examples")

#: What a file must hold.
SHAPE = {
    **dict.fromkeys(("benchmark", "entry", "learner", "device", "data", "command"), str),
    **dict.fromkeys(("n_tasks", "examples_per_task", "batch_size"), int),
    "memories": int | None,
    "part_of": str | None,
    "settings": dict,
    "search": dict,
    "machines": [{"torch": str, "gradmem": str}],
    "runs": [
        {
            **dict.fromkeys(("seed", "machine", *COSTS), int),
            **dict.fromkeys(METRICS, int | float),
            "seconds": int | float,
            "memory_bytes": int | None,
        }
    ],
}
SEARCH = {
    "chosen_on": str,
    "held_out": int | float,
    "seeds": [int],
    "tried": [{"settings": dict, "acc": [int | float | None]}],
}


@dataclass(frozen=True)
class Searched:
    """What a cell's settings were chosen from."""

    seeds: tuple[int, ...]
    held_out: float
    """The part of the training examples that ACC was measured on."""
    tried: tuple[tuple[dict[str, Any], tuple[float | None, ...]], ...]
    """Settings, and their ACC with each seed; None where the run failed."""


@dataclass(frozen=True)
class Kept:
    """The runs of one cell, read back."""

    column: Column
    entry: str
    runs: tuple[dict[str, Any], ...]
    about: dict[str, Any]
    """The rest of the file: settings, what was tried, command, machines, …"""

    @property
    def slug(self) -> str:
        return f"{self.column.slug}-{self.entry.replace(' ', '-')}"

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run["seed"] for run in self.runs)

    @property
    def is_trial(self) -> bool:
        """Whether it is of another size or other data than the board's."""
        return _is_trial(self.about)

    @property
    def tried(self) -> list[dict[str, Any]]:
        """Settings that were tried, each with its ACC on held-out data; none if not searched."""
        found: list[dict[str, Any]] = self.about["search"].get("tried", [])
        return found

    @property
    def searched(self) -> Searched | None:
        """What the settings were chosen from; None if they were not searched."""
        if not (search := self.about["search"]):
            return None
        tried = tuple((one["settings"], tuple(one["acc"])) for one in self.tried)
        return Searched(tuple(search["seeds"]), search["held_out"], tried)

    def has_settings(self, settings: Mapping[str, Any]) -> bool:
        """Whether its runs were made with these settings."""
        return settings_key(self.about["settings"]) == settings_key(settings)

    def has(self, run: Experiment) -> bool:
        """Whether it has a run's seed, with the run's settings."""
        return run.seed in self.seeds and self.has_settings(run.settings)

    def is_of(self, size: Mapping[str, int], data: str) -> bool:
        """Whether its streams have this size and its data are of this kind."""
        return self.about["data"] == data and all(self.about[k] == n for k, n in size.items())

    def values(self, name: str) -> list[float]:
        return [run[name] for run in self.runs]

    def estimate(self, name: str) -> Estimate:
        return Estimate.of(self.values(name))

    def machine(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """What one of the runs was made on; files of old have the device for all of them."""
        return {"device": self.about["device"], **self.about["machines"][run["machine"]]}

    def per_example(self, cost: str) -> float:
        """A cost, in the mean of the seeds, for each example of the stream."""
        return sum(self.values(cost)) / sum(self.values("examples"))


def keep(
    folder: str | os.PathLike[str],
    cell: Cell,
    searched: Searched | None,
    runs: Sequence[Run],
    command: str,
    data: str,
) -> Path | None:
    """Write a cell's file; None if the file in the folder is better: more seeds, or no trial.

    Runs join those that the folder has of other seeds, where these were made in the same way.
    `command` is what was typed, and `data` what the data are (`kind_of_data`).
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{cell.slug}.json"
    before = _read_named(path) if path.exists() else None
    first = runs[0]
    about = {
        "benchmark": cell.column.benchmark,
        "memories": cell.column.memories,
        "entry": cell.entry.name,
        "part_of": cell.entry.part_of,
        "learner": cell.entry.learner,
        "settings": first.config["settings"],
        **{name: first.config[name] for name in ("n_tasks", "examples_per_task", "batch_size")},
        "device": first.config["device"],
        "data": data,  # not the folder they lie in
        "command": command,
    }
    size = {name: about[name] for name in ("n_tasks", "examples_per_task", "batch_size")}
    lines = {run.config["seed"]: _measured(run) for run in runs}
    if before is not None:
        alike = before.is_of(size, data) and before.has_settings(about["settings"])
        if alike and set(lines) - set(before.seeds):
            about |= {name: before.about[name] for name in ("device", "command")}
            searched = searched or before.searched
            lines = {run["seed"]: (run, before.machine(run)) for run in before.runs} | lines
        elif _rank(before.about, len(before.runs)) > _rank(about, len(lines)):
            return None
    machines = [*{json.dumps(machine): None for _, machine in lines.values()}]
    about["machines"] = [json.loads(machine) for machine in machines]
    written = [
        _line(run | {"machine": machines.index(json.dumps(machine))})
        for _, (run, machine) in sorted(lines.items())
    ]
    head = json.dumps(about, indent=1).removesuffix("\n}")
    search = _search(searched)
    write_whole(path, f'{head},\n "search": {search},\n "runs": {_list(written)}\n}}\n')
    return path


def _measured(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's numbers, and what it was made on."""
    found = {
        "seed": run.config["seed"],
        **{name: round(run.result[name], DIGITS) for name in METRICS},
        **{name: run.result[name] for name in COSTS},
        "seconds": round(run.result["seconds"], 2),
        "memory_bytes": _memory_of(run),
    }
    return found, {"device": run.config["device"], **run.result["versions"]}


def _memory_of(run: Run) -> int | None:
    """What a run's learner remembered: examples, and averages of the weights; None for nothing."""
    names = ("memory_bytes", "average_bytes")
    found = [run.result[name] for name in names if run.result.get(name) is not None]
    return sum(found) if found else None


def load(folder: str | os.PathLike[str]) -> list[Kept]:
    """All that is kept in a folder, by the names of the files."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder with kept results")
    return [_read_named(file) for file in sorted(Path(folder).glob("*.json"))]


def _search(searched: Searched | None) -> str:
    """What settings were chosen from, a line for each of them."""
    if searched is None:
        return "{}"
    head = {
        "chosen_on": "data held out of the training sets",
        "held_out": searched.held_out,
        "seeds": searched.seeds,
    }
    lines = [
        _line(
            {
                "settings": settings,
                "acc": [None if acc is None else round(acc, DIGITS) for acc in accs],
            }
        )
        for settings, accs in searched.tried
    ]
    return f'{_line(head)[:-1]},"tried": {_list(lines)}}}'


def _line(value: Any) -> str:
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False)


def _list(lines: Sequence[str]) -> str:
    return "[\n  " + ",\n  ".join(lines) + "\n ]"


def _is_trial(about: dict[str, Any]) -> bool:
    names = ("n_tasks", "examples_per_task", "data")
    return Conditions(**{name: about[name] for name in names}).is_trial(about["benchmark"])


def _rank(about: dict[str, Any], seeds: int) -> tuple[bool, int]:
    return not _is_trial(about), seeds


def _read_named(file: Path) -> Kept:
    try:
        return _read(file)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no kept result of the board: {error}") from error


def _read(file: Path) -> Kept:
    about = read_json(file, "it")
    if problem := misfit(about, SHAPE) or (
        misfit(about["search"], SEARCH, "search") if about["search"] else None
    ):
        raise ValueError(problem)
    check_texts(about)
    benchmark, runs = about["benchmark"], about.pop("runs")
    one_of("benchmark", benchmark, BENCHMARKS)
    if about["memories"] is not None:
        memory_size(about["memories"], BENCHMARKS[benchmark])
    _is_trial(about)  # raises if the sizes are wrong
    if not runs:
        raise ValueError("it has no runs")
    for run in runs:
        _check_run(run, len(about["machines"]))
    if len({run["seed"] for run in runs}) < len(runs):
        raise ValueError("it has two runs with one seed")
    if {run["seed"] for run in runs} & set(about["search"].get("seeds", ())):
        raise ValueError("a seed of its runs is one that settings were chosen with")
    column = Column(benchmark, about["memories"])
    kept = Kept(column, about["entry"], tuple(runs), about)
    if file.name != f"{kept.slug}.json":
        raise ValueError(f"it should be called {kept.slug}.json")
    return kept


def _check_run(run: dict[str, Any], machines: int) -> None:
    if not 0 <= run["machine"] < machines:
        raise ValueError(f"it has no machine {run['machine']}")
    numbers = [run[name] for name in (*METRICS, *COSTS, "seconds")]
    if not all(abs(number) < MAX_NUMBER and math.isfinite(number) for number in numbers):
        raise ValueError("it has a number that is too large")
    if min(run[name] for name in COSTS) < 1 or run["seconds"] < 0:
        raise ValueError("it has a cost below 1, or seconds below 0")
