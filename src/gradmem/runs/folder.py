"""A run's folder: `config.json` says what was run, `result.json` what came of it."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradmem.benchmarks.parts import shown
from gradmem.evaluation.protocol import Result
from gradmem.runs.experiment import Experiment
from gradmem.runs.machine import cores, processor
from gradmem.version import __version__

__all__ = [
    "Failure",
    "Run",
    "RunFolder",
    "check_folder",
    "find_failures",
    "find_runs",
    "newest",
    "read_run",
    "write_json",
    "write_whole",
]

#: What is read of every run.
IN_CONFIG = ("benchmark", "learner")
IN_RESULT = ("R", "acc", "bwt", "fwt", "seconds", "curves")


@dataclass(frozen=True)
class Run:
    """A finished run as it was read back."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]

    @property
    def R(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array(self.result["R"])

    @property
    def benchmark(self) -> str:
        """The benchmark, and which part of it was used for choosing settings, if it was."""
        parts = [shown(self.config["benchmark"])]
        if self.config.get("held_out"):
            parts.append("held-out data")
        if first := self.config.get("first_tasks"):
            parts.append("first task" if first == 1 else f"first {first} tasks")
        return ", ".join(parts)

    @property
    def accuracy(self) -> str:
        """What its accuracies are called."""
        return "held-out accuracy" if self.config.get("held_out") else "test accuracy"

    @property
    def learner(self) -> str:
        """The learner's name."""
        return shown(self.config["learner"])

    @property
    def name(self) -> str:
        """Learner, and what else was asked for beyond the plain benchmark."""
        return f"{self.learner}, shuffled data" if self.config.get("shuffled") else self.learner


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error, as a sweep keeps it."""

    folder: Path
    config: dict[str, Any]
    error: str


class RunFolder:
    """Where one experiment's results go.

    While the run goes on, the rows of R measured so far are kept in `partial.json`, so that a run
    that is interrupted or killed leaves what it knew. `result.json` is only there when it is done.
    """

    def __init__(self, path: str | os.PathLike[str], experiment: Experiment) -> None:
        self.path = Path(path)
        self.experiment = experiment

    def check(self, overwrite: bool = False) -> None:
        """Raise ValueError if it already holds the result of something else."""
        check_folder(self.path)
        held = [name for name in ("result.json", "partial.json") if (self.path / name).exists()]
        if held and not overwrite:
            try:
                known = json.loads((self.path / "config.json").read_text())
            except (OSError, ValueError):
                known = None
            if known != _plain(self.experiment.config()):
                raise ValueError(
                    f"{self.path} holds the result of another experiment ({held[0]}): choose "
                    "another folder, or replace it with --overwrite"
                )

    def open(self, overwrite: bool = False) -> None:
        """Make the folder, unless it already holds the result of something else."""
        self.check(overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        if overwrite:  # what is replaced must not be taken for this experiment's
            for name in ("result.json", "partial.json"):
                (self.path / name).unlink(missing_ok=True)
        write_json(self.path / "config.json", self.experiment.config())

    def save_partial(self, result: Result) -> None:
        write_json(self.path / "partial.json", self._described(result))

    def save(self, result: Result) -> Run:
        described = _plain(self._described(result))
        write_json(self.path / "result.json", described)
        (self.path / "partial.json").unlink(missing_ok=True)
        return Run(self.path, _plain(self.experiment.config()), described)

    def _described(self, result: Result) -> dict[str, Any]:
        metrics = result.metrics
        return {
            "learner": self.experiment.learner,
            "benchmark": self.experiment.benchmark,
            "seed": self.experiment.seed,
            "acc": metrics.acc,
            "bwt": metrics.bwt,
            "fwt": metrics.fwt,
            "forgetting": metrics.forgetting,
            "learning_accuracy": metrics.learning_accuracy,
            "baseline": result.baseline,
            "R": result.R,
            "learned": result.learned,
            "tasks": result.labels,
            "curves": {"examples": result.curve_examples, "accuracy": result.curves},
            "seconds": result.seconds,
            "seconds_training": result.seconds_training,
            "seconds_evaluation": result.seconds_evaluation,
            **result.statistics,
            "versions": versions(),
        }


def versions() -> dict[str, Any]:
    """What a run was made with."""
    return {
        "gradmem": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def find_runs(
    paths: Iterable[str | os.PathLike[str]],
    on_damaged: Callable[[Path, str], None] | None = None,
) -> list[Run]:
    """All finished runs in or below the folders, each once.

    Parameters
    ----------
    paths
        The folders; one may lie in another.
    on_damaged
        Called with the folder of a run that cannot be read and the reason; that run is left out.
        If there is none, such a run is an error.
    """
    roots = [Path(path) for path in paths]
    runs = []
    seen = set()
    for path in roots:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        for folder in (found.parent for found in sorted(path.rglob("result.json"))):
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                runs.append(read_run(folder))
            except ValueError as error:
                if on_damaged is None:
                    raise ValueError(f"{folder} is not a run's folder: {error}") from error
                on_damaged(folder, str(error))
    if not runs:
        kind = "finished run that can be read" if seen else "finished run (result.json)"
        raise ValueError(f"no {kind} in {', '.join(map(str, roots))}")
    return runs


def read_run(folder: Path) -> Run:
    """The finished run in a folder; ValueError says what is wrong with its files."""
    config = _read(folder / "config.json", IN_CONFIG)
    result = _read(folder / "result.json", IN_RESULT)
    if not isinstance(config.get("settings", {}), dict):
        raise ValueError("config.json has settings that are no dictionary")
    for name in ("acc", "bwt", "fwt", "seconds"):
        if not isinstance(result[name], int | float | None):
            raise ValueError(f"result.json has no number for {name}")
    curves = result["curves"]
    if not isinstance(curves, dict) or not {"examples", "accuracy"} <= set(curves):
        raise ValueError("result.json has no learning curves")
    for name, matrix in (("R", result["R"]), ("curves", curves["accuracy"])):
        _check_matrix(name, matrix)
    learned = result.get("learned")
    if learned is not None and not (
        isinstance(learned, list)
        and len(learned) == len(result["R"])
        and all(type(task) is int or task is None for task in learned)
    ):
        raise ValueError("result.json has no task for each row of R in learned")
    return Run(folder, config, result)


def find_failures(paths: Iterable[str | os.PathLike[str]]) -> list[Failure]:
    """All runs in or below the folders that failed and were not made since, each once."""
    found = {}
    for path in paths:
        for file in sorted(Path(path).rglob("failure.json")):
            folder = file.parent
            if folder.resolve() in found or (folder / "result.json").exists():
                continue
            try:
                config = _read(folder / "config.json", IN_CONFIG)
                failure = _read(file, ("type", "message"))
            except ValueError:
                continue  # being written, or not ours
            error = f"{failure['type']}: {failure['message']}"
            found[folder.resolve()] = Failure(folder, config, error)
    return list(found.values())


def newest(runs: Iterable[Run]) -> list[Run]:
    """Of runs with the same config, so of one experiment and seed, the one made last."""
    runs = list(runs)
    by_time = sorted(runs, key=lambda run: (run.folder / "result.json").stat().st_mtime_ns)
    last = {_config_text(run): run for run in by_time}
    return [run for run in runs if last[_config_text(run)] is run]


def check_folder(path: Path, option: str = "--out") -> None:
    """Refuse a path for results that is a file or leads through one."""
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise ValueError(f"{option} must be a folder, {part} is a file")


def write_json(path: Path, value: Any) -> None:
    """Write `value`, whole or not at all."""
    write_whole(path, json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that the file is either the old one or the whole new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if sys.platform != "win32":
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """What a run's file holds; all of `names` must be in it."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is not whole: {error}") from error
    missing = [name for name in names if not isinstance(value, dict) or name not in value]
    if missing:
        raise ValueError(f"{path.name} has no {', '.join(missing)}")
    return value  # type: ignore[no-any-return]


def _check_matrix(name: str, values: Any) -> None:
    try:
        matrix = np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        matrix = np.empty(0)
    if matrix.ndim != 2 or not matrix.size or not np.isfinite(matrix).all():
        raise ValueError(f"result.json has no matrix of numbers for {name}")


def _config_text(run: Run) -> str:
    return json.dumps(run.config, sort_keys=True)


def _plain(value: Any) -> Any:
    """`value` as JSON knows it: arrays as lists, what is not a number as null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
