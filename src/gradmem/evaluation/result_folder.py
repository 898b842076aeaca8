"""Writes the folder of a run: config.json, partial.json and result.json."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradmem.files import plain, read_json, write_json

__all__ = ["ResultFolder", "check_folder", "what_changed"]


class ResultFolder:
    """The folder of one run, whose `config` says which.

    While the run goes on, `partial.json` may hold the rows of R measured so far, also after the run
    was interrupted or killed. `result.json` is only there when the run is done.
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = plain(dict(config))

    def check(self, overwrite: bool = False) -> None:
        """Raise ValueError if it already holds the result of something else."""
        check_folder(self.path)
        names = ("result.json", "partial.json", "checkpoint")
        held = [name for name in names if (self.path / name).exists()]
        if held and not overwrite:
            try:
                known = read_json(self.path / "config.json")
            except ValueError:
                known = {}
            if known != self.config:
                changed = what_changed(known, self.config) if known else ""
                raise ValueError(
                    f"{self.path} holds the result of another experiment ({held[0]}): "
                    f"{changed or 'its config.json is another'}. Choose another folder, or replace "
                    "it with --overwrite (overwrite=True)"
                )

    def check_same(self, R: Any, overwrite: bool = False) -> None:
        """Raise ValueError if it holds another R, though of a run with the same config."""
        file = self.path / "result.json"
        if overwrite or not file.exists():
            return
        try:
            known = read_json(file).get("R")
        except ValueError:
            known = None
        if known != plain(R):
            raise ValueError(
                f"{self.path} holds the result of another run with the same settings: choose "
                "another folder, name the runs apart (seed=…), or give overwrite=True"
            )

    def open(self, overwrite: bool = False) -> None:
        """Make the folder, unless it already holds the result of something else."""
        self.check(overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for name in ("result.json", "partial.json"):
                (self.path / name).unlink(missing_ok=True)
        write_json(self.path / "config.json", self.config)

    def renew(self) -> None:
        """Make the folder again if it vanished while the run went on.

        Raise ValueError if another experiment has taken its place meanwhile.
        """
        if not (self.path / "config.json").exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", self.config)
        self.check()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder for one run: another process that asks for it gets a ValueError."""
        from filelock import FileLock, Timeout

        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path / ".lock", timeout=0):
                for stray in self.path.glob(".*.json-*"):  # of a process that was killed
                    stray.unlink(missing_ok=True)
                yield
        except Timeout:
            raise ValueError(f"another run is being made in {self.path}: wait for it") from None

    def write(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """Write result.json from `Result.described`, and return what it holds."""
        written: dict[str, Any] = plain(dict(described))
        self.renew()
        write_json(self.path / "result.json", written)
        (self.path / "partial.json").unlink(missing_ok=True)
        return written


def check_folder(path: Path, option: str = "--out") -> None:
    """Refuse a path for results that is a file or leads through one."""
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise ValueError(f"{option} must be a folder, {part} is a file")


def what_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between the configs of two runs, in words; nothing if all is same.

    A checkpoint of an earlier version does not say what its data were.
    """
    old, new = _flat(before), _flat(now)
    if "data" not in old:
        new.pop("data", None)
    parts = []
    for name in {**old, **new}:
        if name == "settings" or old.get(name) == new.get(name):
            continue
        if name in ("data", "labels"):
            parts.append({"data": "its data were others", "labels": "its tasks were others"}[name])
        else:
            parts.append(f"{name} was {old.get(name)!r} and is {new.get(name)!r}")
    return ", ".join(parts)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = config.get("settings")
    return {**config, **(settings if isinstance(settings, Mapping) else {})}
