"""A run's folder: `config.json` says what was run, `result.json` what came of it."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradmem.experiment import Experiment
from gradmem.machine import cores, processor
from gradmem.protocol import Result

__all__ = ["Run", "RunFolder", "find_runs", "write_json", "write_whole"]


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
    def name(self) -> str:
        """Learner, and what else was asked for beyond the plain benchmark."""
        shuffled = ", shuffled data" if self.config.get("shuffled") else ""
        return f"{self.config['learner']}{shuffled}"


class RunFolder:
    """Where one experiment's results go.

    While the run goes on, the rows of R measured so far are kept in `partial.json`, so that a run
    that is interrupted or killed leaves what it knew. `result.json` is only there when it is done.
    """

    def __init__(self, path: str | os.PathLike[str], experiment: Experiment) -> None:
        self.path = Path(path)
        self.experiment = experiment

    def open(self, overwrite: bool = False) -> None:
        """Make the folder, unless it already holds the result of something else."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out must be a folder, {self.path} is a file")
        config = self.path / "config.json"
        held = [name for name in ("result.json", "partial.json") if (self.path / name).exists()]
        if held and not overwrite:
            try:
                known = json.loads(config.read_text())
            except (OSError, ValueError):
                known = None
            if known != _plain(self.experiment.config()):
                raise ValueError(
                    f"{self.path} holds the result of another experiment ({held[0]}): choose "
                    "another folder, or replace it with --overwrite"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(config, self.experiment.config())

    def save_partial(self, result: Result) -> None:
        write_json(self.path / "partial.json", self._described(result))

    def save(self, result: Result) -> None:
        write_json(self.path / "result.json", self._described(result))
        (self.path / "partial.json").unlink(missing_ok=True)

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
    from gradmem import __version__

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


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """All finished runs in or below the folders."""
    folders = [Path(path) for path in paths]
    runs = []
    for path in folders:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        for found in sorted(path.rglob("result.json")):
            try:
                config = json.loads((found.parent / "config.json").read_text())
                result = json.loads(found.read_text())
                result["R"], config["learner"], config["benchmark"]  # what every run has
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{found.parent} is not a run's folder: {error!r}") from error
            runs.append(Run(found.parent, config, result))
    if not runs:
        raise ValueError(f"no finished run (result.json) in {', '.join(map(str, folders))}")
    return runs


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
