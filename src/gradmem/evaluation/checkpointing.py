"""A run that can be stopped at any example and goes on bit for bit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from gradmem.checkpoint import (
    CheckpointError,
    Copied,
    Parts,
    copied,
    load_state,
    previous_of,
    save_state,
)
from gradmem.validation import positive_int

__all__ = ["RunCheckpoint", "StoppedRun"]

ABOUT = "a run"


class StoppedRun(KeyboardInterrupt):
    """A run that was interrupted and saved; the message says how to go on."""


class RunCheckpoint:
    """A folder with a run's newest state, and the one before it.

    Files are written by a thread of their own while the run goes on. What goes wrong there is
    raised by the next save, or at the end of the run.

    Parameters
    ----------
    folder
        Made if need be.
    save_every
        Examples between two saves inside a task; the end of each task is saved in any case.
    pause
        Least seconds between two saves, for runs that may be short.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        save_every: int | None = None,
        pause: float = 0.0,
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "checkpoint.safetensors"
        self.save_every = None if save_every is None else positive_int("save_every", save_every)
        self.pause = pause
        self._last = time.monotonic()
        self._signal: int | None = None
        self._parts = Parts(self.folder)
        self._writer: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def load(self) -> dict[str, Any] | None:
        """The newest whole state; None if there is none.

        A newest one that cannot be read is said, and the one before it is used.
        """
        known = [path for path in (self.path, previous_of(self.path)) if path.exists()]
        problems = []
        for path in known:
            try:
                state = load_state(path, ABOUT)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            self._parts.adopt(path)
            if problems:
                warnings.warn(
                    f"{problems[0]}: going on from the checkpoint before it",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return state
        if problems:
            raise CheckpointError("; ".join(problems))
        return None

    def is_due(self, before: int, examples: int) -> bool:
        """Whether to save after `examples` examples; `before` were observed a step ago."""
        if self._signal is not None:
            return True
        crossed = self.save_every and examples // self.save_every > before // self.save_every
        return bool(crossed) and self.may_save()

    def may_save(self) -> bool:
        """Whether the last save was long enough ago."""
        return time.monotonic() - self._last >= self.pause

    def save(self, state: dict[str, Any]) -> None:
        """Copy a state and let it be written; the newest one so far is kept as the one before."""
        self.wait()
        self._last = time.monotonic()
        self._writer = threading.Thread(target=self._write, args=(copied(state),))
        self._writer.start()

    def _write(self, state: Copied) -> None:
        """Write a state; if its folder vanishes meanwhile, once more in a new one."""
        previous = previous_of(self.path)
        for _ in range(3):
            self._error = None
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                save_state(self.path, state, ABOUT, previous, self._parts)
                self._parts.clean(self.path, previous)
                return
            except CheckpointError as error:
                self._error = error
                if not isinstance(error.__cause__, FileNotFoundError):
                    return
            except FileNotFoundError:
                self._error = CheckpointError(f"{self.folder} vanishes again and again")
            except OSError as error:
                self._error = CheckpointError(f"{self.folder} cannot be made: {error.strerror}")
                return

    def wait(self) -> None:
        """Wait until what was saved is on the disk; raise what went wrong there."""
        if self._writer is not None:
            self._writer.join()
        self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def clear(self) -> None:
        """Remove both states: the run is over and its result kept elsewhere."""
        self.wait()
        for path in (self.path, previous_of(self.path)):
            path.unlink(missing_ok=True)
        self._parts.clean()
        for stray in [*self.folder.glob(f".{self.path.name}-*"), *self.folder.glob(".part-*")]:
            stray.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM ask for an end after the step; a second SIGINT ends at once.

        In the main thread only: others get no signals. When it is left, all is on the disk.
        """
        try:
            if threading.current_thread() is threading.main_thread():
                with self._asked_by_signals():
                    yield
            else:
                yield
        except BaseException:
            with suppress(CheckpointError):  # what was raised says more
                self.wait()
            raise
        self.wait()

    @contextmanager
    def _asked_by_signals(self) -> Iterator[None]:

        def ask(number: int, frame: FrameType | None) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = number

        # What is ignored stays ignored: a worker of a sweep leaves SIGINT to its parent.
        numbers = [
            n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN
        ]
        before = {number: signal.signal(number, ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop_if_asked(self) -> None:
        """End the run, which has just been saved, if a signal asked for it."""
        if self._signal is None:
            return
        self.wait()
        number, self._signal = self._signal, None
        name = signal.Signals(number).name
        message = f"stopped by {name}, saved in {self.folder}: started again, it goes on"
        if number == signal.SIGTERM:
            print(message, file=sys.stderr)
            raise SystemExit(128 + number)
        raise StoppedRun(message)
