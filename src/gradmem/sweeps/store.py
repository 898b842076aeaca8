"""A sweep's folder: the sweep, its runs, and which of them are being run.

sweep.json          the sweep
trials.json         the settings that a search has tried so far, in their order
runs/KEY/           config.json and result.json of a run, or failure.json
locks/KEY.lock      held by the process that is running it, and let go by the system if it dies
log.jsonl           a line for each run that was started, finished or failed
chosen.json         the best settings, and the runs with them
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradmem.files import misfit, read_json, write_json
from gradmem.runs.experiment import Experiment
from gradmem.runs.read_folder import Failure, Run, printable, read_run
from gradmem.runs.write_folder import RunFolder
from gradmem.sweeps.plan import Sweep

__all__ = ["Failed", "Store", "only_one"]

#: Lines of a traceback that are kept.
TRACEBACK_LINES = 20


@dataclass(frozen=True)
class Failed:
    """The error that ended a run, as plain data: it may come from another machine."""

    type: str
    message: str
    traceback: list[str]

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """An error that was caught."""
        lines = "".join(traceback.format_exception(error)).splitlines()
        return cls(type(error).__name__, str(error), lines[-TRACEBACK_LINES:])


class Store:
    """Reads and writes a sweep's folder; any number of processes may do so at once.

    A run is done when its `result.json` or `failure.json` exists. Both are written whole or not at
    all by the process that holds the run's lock. So a run that is done is not run again, and a run
    whose process died is. The folder must be on a file system with locks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def exists(self) -> bool:
        """Whether there is a sweep in the folder."""
        return (self.path / "sweep.json").exists()

    def open(self, sweep: Sweep) -> Sweep:
        """Make the folder, or extend the sweep that is in it; returns the whole sweep."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"a sweep's folder is needed, {self.path} is a file")
        self._make_folders()
        with self._lock("sweep"):
            if self.exists():
                known = self.sweep()
                sweep = known.extended(sweep)
                if sweep == known:
                    return known
            _remove_strays(self.path)
            write_json(self.path / "sweep.json", sweep.to_json())
        return sweep

    def sweep(self) -> Sweep:
        """The sweep in the folder."""
        file = self.path / "sweep.json"
        if not self.exists():
            raise ValueError(f"{self.path} is no sweep's folder: it has no sweep.json")
        try:
            return Sweep.from_json(read_json(file, "it"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} cannot be read: {error!s:.1000}") from None

    def trials(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """Benchmark → learner → the settings that a search has tried so far."""
        sweep, file = self.sweep(), self.path / "trials.json"
        found = read_json(file) if file.exists() else {}
        tried: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for benchmark, learners in sweep.grids.items():
            tried[benchmark] = {}
            for learner, grid in learners.items():
                known = found.get(benchmark, {})
                known = known.get(learner, []) if isinstance(known, dict) else known
                if problem := misfit(known, [dict.fromkeys(grid, object)], learner):
                    raise ValueError(f"{file} cannot be read: {problem}")
                tried[benchmark][learner] = [{name: one[name] for name in grid} for one in known]
        return tried

    def add_trials(
        self, benchmark: str, learner: str, before: int, settings: Sequence[dict[str, Any]]
    ) -> None:
        """Write settings to try, after so many others; nothing if another process was first."""
        with self._lock("sweep"):
            tried = self.trials()
            if len(tried[benchmark][learner]) == before:
                tried[benchmark][learner] += settings
                write_json(self.path / "trials.json", tried)

    def folder(self, key: str) -> Path:
        return self.path / "runs" / key

    def is_finished(self, key: str) -> bool:
        return (self.folder(key) / "result.json").exists()

    def is_failed(self, key: str) -> bool:
        return (self.folder(key) / "failure.json").exists()

    def is_done(self, key: str) -> bool:
        return self.is_finished(key) or self.is_failed(key)

    def run(self, key: str) -> Run:
        """A finished run."""
        try:
            return read_run(self.folder(key))
        except ValueError as error:
            raise ValueError(
                f"{self.folder(key)} is not a run's folder: {error}. Delete it, and its run is "
                "made again"
            ) from error

    def failure(self, key: str) -> dict[str, Any]:
        """What is known of a run that failed: type, message, traceback."""
        found: dict[str, Any] = {"type": "Error", "message": "unknown, failure.json cannot be read"}
        with suppress(ValueError):
            found |= read_json(self.folder(key) / "failure.json")
        return found

    def outcome(self, experiment: Experiment) -> Run | Failure:
        """The result or the failure of a run that is done."""
        if self.is_finished(experiment.key):
            return self.run(experiment.key)
        found = self.failure(experiment.key)
        lines = f"{found['type']}: {found['message']}".splitlines()
        error = "\n".join(map(printable, lines))
        return Failure(self.folder(experiment.key), experiment.config(), error)

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Claim a run inside the block; gives False if another process has claimed it."""
        from filelock import Timeout

        self._make_folders()
        lock = self._lock(key)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def is_claimed(self, key: str) -> bool:
        """Whether some process is running it."""
        with self.claim(key) as free:
            return not free

    def start(self, experiment: Experiment) -> None:
        """Write the folder of a claimed run that begins."""
        folder = self.folder(experiment.key)
        RunFolder(folder, experiment).open(overwrite=True)
        _remove_strays(folder)
        self._note(experiment.key, "started")

    def finish(self, experiment: Experiment, described: Mapping[str, Any]) -> Run:
        """Write a claimed run's result, given as `Result.described` has it."""
        folder = RunFolder(self.folder(experiment.key), experiment)
        run = Run(folder.path, folder.config, folder.write(described))
        self._note(experiment.key, "finished")
        return run

    def fail(self, experiment: Experiment, failed: Failed) -> Failure:
        """Write the error that ended a claimed run."""
        folder = self.folder(experiment.key)
        RunFolder(folder, experiment).open(overwrite=True)
        write_json(folder / "failure.json", {**asdict(failed), "time": time.time()})
        self._note(experiment.key, "failed")
        return Failure(folder, experiment.config(), f"{failed.type}: {failed.message}")

    def forget_failures(self, keys: Iterable[str]) -> None:
        """Let the runs among these that failed be run again."""
        for key in keys:
            with self.claim(key) as mine:
                if mine:
                    (self.folder(key) / "failure.json").unlink(missing_ok=True)

    def write_chosen(self, chosen: dict[str, Any]) -> None:
        """Write chosen.json."""
        with self._lock("sweep"):
            _remove_strays(self.path)
            write_json(self.path / "chosen.json", chosen)

    def log(self) -> list[dict[str, Any]]:
        """The lines of log.jsonl."""
        try:
            lines = (self.path / "log.jsonl").read_text("utf-8").splitlines()
            return [json.loads(line) for line in lines]
        except FileNotFoundError:
            return []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path / 'log.jsonl'} cannot be read: {error}") from error

    def _note(self, key: str, event: str) -> None:
        entry = {"key": key, "event": event, "pid": os.getpid(), "time": time.time()}
        line = (json.dumps(entry) + "\n").encode()
        with open(self.path / "log.jsonl", "ab", buffering=0) as file:
            file.write(line)  # at once, so that lines of several processes do not mix

    def _make_folders(self) -> None:
        for name in ("runs", "locks"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def _lock(self, name: str) -> Any:
        from filelock import FileLock

        return FileLock(self.path / "locks" / f"{name}.lock")


@contextmanager
def only_one(out: Path, command: str) -> Iterator[None]:
    """Refuse a second process of a command in a folder: two would slow each other down."""
    from filelock import FileLock, Timeout

    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / f"{command}.lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"another `gradmem {command}` is at work in {out}: wait for it") from None


def _remove_strays(folder: Path) -> None:
    """Remove temporary files of processes that were killed; the folder must be claimed."""
    for stray in folder.glob(".*.json-*"):
        stray.unlink(missing_ok=True)
