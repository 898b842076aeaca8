"""Finds and reads folders of runs: config.json says what was run, result.json what came out."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradmem.evaluation import Result
from gradmem.evaluation.metrics import transfer_metrics
from gradmem.files import plain, read_json

__all__ = [
    "COUNTS",
    "Failure",
    "Run",
    "check_result",
    "find_failures",
    "find_runs",
    "newest",
    "printable",
    "read_run",
]

#: What is read of every run.
REQUIRED = ("R", "acc", "bwt", "fwt", "seconds", "curves")

#: Larger numbers are refused, since their squares would overflow.
MAX_NUMBER = 1e100

#: A stored metric may differ from what R gives by this part of the largest score.
ROUNDING = 1e-6

#: Unicode's categories of control characters, invisible marks, surrogates and line separators.
UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")

#: What learners count.
COUNTS = (
    "steps",
    "example_gradients",
    "memory_bytes",
    "average_bytes",
    "violations",
    "violated_constraints",
    "active_constraints",
    "solver_steps",
)


@dataclass(frozen=True)
class Run:
    """A finished run as it was read back."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]

    @classmethod
    def of(cls, result: Result) -> Run:
        """A result as a run without a folder."""
        config = plain(result.config)
        return cls(Path(), config, plain(result.described(config)))

    @property
    def R(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array(self.result["R"])

    @property
    def benchmark(self) -> str:
        """The benchmark's name, with held-out data, fewer tasks or another score, if any."""
        parts = [_name(self.config.get("benchmark") or "continuum")]
        if self.config.get("held_out"):
            parts.append("held-out data")
        if first := self.config.get("first_tasks"):
            parts.append("first task" if first == 1 else f"first {printable(first)} tasks")
        if self.score != "accuracy":
            parts.append(self.score)
        return ", ".join(parts)

    @property
    def learner(self) -> str:
        return _name(self.config.get("learner") or "learner")

    @property
    def score(self) -> str:
        """The name of what R holds."""
        return printable(self.result.get("score") or "accuracy")

    @property
    def measure(self) -> str:
        """The score, and what it was measured on."""
        return f"{'held-out' if self.config.get('held_out') else 'test'} {self.score}"

    @property
    def name(self) -> str:
        """The learner's name, and whether the data were shuffled."""
        return f"{self.learner}, shuffled data" if self.config.get("shuffled") else self.learner


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error, as a sweep keeps it."""

    folder: Path
    config: dict[str, Any]
    error: str


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
    config = _read(folder / "config.json")
    result = _read(folder / "result.json", REQUIRED)
    if not isinstance(config.get("settings", {}), dict):
        raise ValueError("config.json has settings that are no dictionary")
    try:
        check_result(result)
    except ValueError as error:
        raise ValueError(f"result.json {error}") from None
    return Run(folder, config, result)


def find_failures(paths: Iterable[str | os.PathLike[str]]) -> list[Failure]:
    """All runs in or below the folders that failed and have no result, each once."""
    found = {}
    for path in paths:
        for file in sorted(Path(path).rglob("failure.json")):
            folder = file.parent
            if folder.resolve() in found or (folder / "result.json").exists():
                continue
            try:
                config = _read(folder / "config.json")
                failure = _read(file, ("type", "message"))
            except ValueError:
                continue  # being written, or not gradmem's
            error = f"{failure['type']}: {failure['message']}"
            found[folder.resolve()] = Failure(folder, config, error)
    return list(found.values())


def newest(runs: Iterable[Run]) -> list[Run]:
    """Of runs of one experiment and seed, the one made last.

    Runs are the same if their configs are the same and have a seed. Configs without a seed
    (`Result.save`) do not determine the network, so such runs must have the same R, too.
    """
    runs = list(runs)
    by_time = sorted(runs, key=lambda run: (run.folder / "result.json").stat().st_mtime_ns)
    last = {_identity(run): run for run in by_time}
    return [run for run in runs if last[_identity(run)] is run]


def printable(value: Any) -> str:
    r"""`value` as one line of text without control characters, which could steer a terminal.

    Examples
    --------
    >>> printable("gem\x1b[2J\n| x")
    'gem�[2J�| x'
    """
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return "".join("\ufffd" if unicodedata.category(c) in UNPRINTABLE else c for c in text)


def _name(value: Any) -> str:
    """A benchmark's or a learner's name: of `module:name`, the name."""
    text = printable(value)
    reference = re.fullmatch(r"\S+:(?:\S+\.)?(\w[\w-]*)", text)
    return reference[1] if reference else text


def _read(path: Path, names: Iterable[str] = ()) -> dict[str, Any]:
    """What a run's file holds; all of `names` must be in it."""
    value = read_json(path, path.name)
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{path.name} has no {', '.join(missing)}")
    return value


def check_result(result: dict[str, Any]) -> None:
    """Raise ValueError if an entry that tables or pictures use is wrong, or contradicts R."""
    for name in ("acc", "bwt", "fwt", "seconds", *COUNTS):
        if result.get(name) is not None and _numbers(result[name], 0) is None:
            raise ValueError(f"has no number for {name}")
    R = _matrix("R", result["R"])
    curves = result["curves"]
    if not isinstance(curves, dict) or not {"examples", "accuracy"} <= set(curves):
        raise ValueError("has no learning curves")
    points = _matrix("curves", curves["accuracy"])
    examples = _numbers(curves["examples"], 1)
    if examples is None or points.shape != (len(examples), R.shape[1]):
        raise ValueError("has learning curves of another size than R")
    if result.get("baseline") is not None:
        baseline = _numbers(result["baseline"], 1)
        if baseline is None or len(baseline) != R.shape[1]:
            raise ValueError("has no baseline for each column of R")
    learned = result.get("learned")
    if learned is not None and not (
        isinstance(learned, list)
        and len(learned) == len(R)
        and all(task is None or task in range(R.shape[1]) for task in learned)
    ):
        raise ValueError("has no task for each row of R in learned")
    if not isinstance(result.get("tasks") or [], list):
        raise ValueError("has no list of tasks")
    if (found := result.get("boundaries")) and _numbers(found, 1) is None:
        raise ValueError("has no numbers for boundaries")
    if not isinstance(result.get("versions") or {}, dict):
        raise ValueError("has versions that are no dictionary")
    _check_metrics(result, R)


def _check_metrics(result: dict[str, Any], R: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Raise ValueError if acc, bwt or fwt is not what R gives."""
    learned, baseline = result.get("learned"), result.get("baseline")
    known = ["acc"]
    if learned is not None or len(R) == R.shape[1]:
        known += ["bwt"] if baseline is None else ["bwt", "fwt"]
    else:
        learned = [None] * len(R)
    metrics = transfer_metrics(R, np.zeros(R.shape[1]) if baseline is None else baseline, learned)
    for name in (name for name in known if name in result):
        found, right = result[name], plain(getattr(metrics, name))
        if found != right and not (
            found is not None
            and right is not None
            and abs(found - right) <= ROUNDING * max(1.0, np.abs(R).max())
        ):
            raise ValueError(f"has {name} {found}, but its R gives {right}")


def _matrix(name: str, values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    matrix = _numbers(values, 2)
    if matrix is None:
        raise ValueError(f"has no matrix of numbers for {name}")
    return matrix


def _numbers(values: Any, ndim: int) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """`values` as an array of numbers with `ndim` dimensions; None if they are not."""
    try:
        kept = np.array(values)
        array = kept.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    fits = array.ndim == ndim and array.size > 0 and kept.dtype.kind in "iuf"
    return array if fits and (np.abs(array) < MAX_NUMBER).all() else None


def _identity(run: Run) -> str:
    found = None if run.config.get("seed") is not None else run.result["R"]
    return json.dumps([run.config, found], sort_keys=True)
