"""Results as small files to keep: one per setting, with R of every seed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.benchmarks.data_sets import SAMPLE, WHOLE
from gradmem.evaluation.metrics import transfer_metrics
from gradmem.files import check_texts, misfit, plain, read_json, write_whole
from gradmem.reports import Row
from gradmem.reproduction.plan import BENCHMARKS, N_TASKS, Conditions, Setting
from gradmem.runs.read_folder import Run, check_result
from gradmem.validation import one_of, positive_int

__all__ = ["Kept", "keep", "load"]

#: Accuracies are kept with so many digits: MNIST's test sets have 10,000 images.
DIGITS = 4

#: What a file says once for all its runs, taken from their config.
COMMON = ("epochs", "shuffled", "n_tasks", "examples_per_task", "batch_size", "device")

#: What a file must hold.
SHAPE = {
    **dict.fromkeys(("benchmark", "learner", "device", "data", "command"), str),
    **dict.fromkeys(("n_tasks", "examples_per_task", "batch_size"), int | None),
    "epochs": int,
    "shuffled": bool,
    "changes": dict,
    "settings": dict,
    "machines": [{"torch": str, "gradmem": str}],
    "examples": [int],
    "runs": [
        {
            **dict.fromkeys(("seed", "machine"), int),
            "alone": bool,
            "seconds": int | float,
            "R": [list],
            "baseline": list,
        }
    ],
}


@dataclass(frozen=True)
class Kept:
    """The runs of one setting, read back."""

    setting: Setting
    row: Row
    alone: tuple[bool, ...]
    """Of each run, whether it had the machine to itself, so that its seconds can be compared."""
    about: dict[str, Any]
    """The rest of the file: settings, command, data, machines, …"""

    @property
    def seeds(self) -> int:
        return len(self.row.runs)

    @property
    def is_trial(self) -> bool:
        """Whether it is smaller than the paper's, so that there is nothing to compare it with."""
        return _is_trial(self.about)


def keep(
    folder: str | os.PathLike[str],
    setting: Setting,
    runs: Sequence[tuple[Run, bool]],
    command: str,
    data: str | None = None,
) -> Path | None:
    """Write a setting's file; None if the file in the folder is better: more seeds, or no trial.

    `runs` are the setting's runs, each with whether it had the machine to itself. `command` is what
    was typed, and `data` what the data are, if that is known (`kind_of_data`).
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{setting.slug}.json"
    before = _read_named(path) if path.exists() else None
    first = runs[0][0]
    machines = [*{json.dumps(run.result["versions"]): None for run, _ in runs}]
    about = {
        "benchmark": setting.benchmark,
        "learner": setting.learner,
        "changes": dict(setting.changes),
        "settings": first.config["settings"],
        **{name: first.config[name] for name in COMMON},
        # Not the folder they lie in.
        "data": data or (SAMPLE if first.config["data"] == SAMPLE else WHOLE),
        "command": command,
        "machines": [json.loads(machine) for machine in machines],
        "examples": first.result["curves"]["examples"],
    }
    lines = [
        json.dumps(
            {"seed": run.config["seed"], "alone": alone}
            | {name: _rounded(v, 6) for name, v in _facts(run).items()}
            | {"machine": machines.index(json.dumps(run.result["versions"]))}
            | {name: _rounded(run.result[name], DIGITS) for name in ("baseline", "R")},
            separators=(",", ":"),
            allow_nan=False,
        )
        for run, alone in runs
    ]
    if before is not None and _rank(before.about, before.seeds) > _rank(about, len(runs)):
        return None
    head = json.dumps(about, indent=1).removesuffix("\n}")
    write_whole(path, f'{head},\n "runs": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
    return path


def load(folder: str | os.PathLike[str]) -> dict[Setting, Kept]:
    """All that is kept in a folder."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder with kept results")
    files = [file for file in sorted(Path(folder).glob("*.json")) if file.name[:5] != "grid-"]
    return {kept.setting: kept for kept in map(_read_named, files)}


def _is_trial(about: dict[str, Any]) -> bool:
    size = {name: about[name] for name in ("n_tasks", "examples_per_task", "data")}
    return Conditions(**size).is_trial(about["benchmark"])


def _rank(about: dict[str, Any], seeds: int) -> tuple[bool, int]:
    return not _is_trial(about), seeds


def _read_named(file: Path) -> Kept:
    try:
        return _read(file)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no kept result: {error}") from error


def _read(file: Path) -> Kept:
    about = read_json(file, "it")
    if problem := misfit(about, SHAPE):
        raise ValueError(problem)
    check_texts(about)
    runs = about.pop("runs")
    one_of("benchmark", about["benchmark"], BENCHMARKS)
    positive_int("epochs", about["epochs"])
    _is_trial(about)  # raises if the sizes are wrong
    for name, value in about["changes"].items():
        kind = int if name in ("memories", "budget") else int | float | str
        if problem := misfit(value, kind, f"{name} in changes"):
            raise ValueError(problem)
    named = {name: about[name] for name in ("benchmark", "learner", "epochs", "shuffled")}
    setting = Setting(changes=tuple(about["changes"].items()), **named)
    read = tuple(_run(file, about, run) for run in runs)
    if not read:
        raise ValueError("it has no runs")
    row = Row(setting.benchmark, read[0].name, read)
    return Kept(setting, row, tuple(bool(run["alone"]) for run in runs), about)


def _run(file: Path, about: dict[str, Any], run: dict[str, Any]) -> Run:
    config = {name: about[name] for name in ("benchmark", "learner", "settings", "data", *COMMON)}
    # What follows from R is computed again, not read.
    computed = ("acc", "bwt", "fwt")
    left = ("seed", "alone", *computed)
    result = {name: value for name, value in run.items() if name not in left}
    if not 0 <= run["machine"] < len(about["machines"]):
        raise ValueError(f"it has no machine {run['machine']}")
    T = about["n_tasks"] or N_TASKS
    rows = 1 if about["shuffled"] else T
    if (len(run["R"]), len(run["baseline"])) != (rows, T):
        raise ValueError(f"R must be {rows} x {T}, with a baseline for each column")
    result["versions"] = about["machines"][run["machine"]]
    accuracy = [run["baseline"], *run["R"]]
    check_result(result | {"curves": {"examples": about["examples"], "accuracy": accuracy}})
    R, baseline = np.array(run["R"]), np.array(run["baseline"])
    learned = [None] if about["shuffled"] else range(len(R))
    metrics = transfer_metrics(R, baseline, learned)
    result |= plain({name: getattr(metrics, name) for name in computed})
    result["curves"] = {"examples": about["examples"], "accuracy": [baseline, *R]}
    return Run(file, config | {"seed": run["seed"]}, result)


def _facts(run: Run) -> dict[str, Any]:
    """Metrics, seconds and the learner's counts: all that is a single number."""
    return {
        name: value
        for name, value in run.result.items()
        if name != "seed" and (value is None or isinstance(value, int | float))
    }


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return round(value, digits) if isinstance(value, float) else value
