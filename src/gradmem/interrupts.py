"""Steps that are not torn: interrupts wait for their end, and one thread steps at a time."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without enums, for every step
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Lock", "uninterrupted"]


class Lock:
    """A lock that its own thread may take again, and that is new in a copy of its owner."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Lock:
        return Lock()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


class uninterrupted:  # noqa: N801 - used like a function
    """Let Ctrl-C wait until the block has ended; a second one ends it at once.

    Only the main thread is interrupted by signals, so nothing is done in others. A handler of the
    user's own is called afterwards in place of the interrupt.
    """

    __slots__ = ("_before", "_waiting")

    def __enter__(self) -> None:
        self._before: Any = None
        self._waiting: list[tuple[int, FrameType | None]] = []
        if threading.get_ident() == threading.main_thread().ident:
            before = _signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                _signal.signal(signal.SIGINT, self._wait)

    def __exit__(self, *_: object) -> None:
        if self._before is not None and _signal.getsignal(signal.SIGINT) == self._wait:
            _signal.signal(signal.SIGINT, self._before)
            if self._waiting:
                self._before(*self._waiting[0])

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:
            _signal.signal(signal.SIGINT, self._before)
            raise KeyboardInterrupt
        self._waiting.append((number, frame))
